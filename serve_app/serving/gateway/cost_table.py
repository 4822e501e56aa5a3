"""The costs of all models as comma-separated values, for spreadsheets and bills."""

import csv
import io
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

_COLUMNS = ("pool", "class", "tenant", "engine_seconds", "gpu_seconds", "imposed_delay_seconds")
# With these a cell begins that a spreadsheet would compute. Tenants may choose their own names.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def cost_table(models: Iterable[Mapping[str, Any]]) -> str:
    """A line for each pool, class and tenant, with a heading; seconds have milliseconds.

    `since` is when counting began, in UTC; empty where a scheduler of an older release tells. `gpu_seconds`
    is empty where a pool has no GPUs. A name that a spreadsheet would take for a formula gets an apostrophe
    in front.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("model", *_COLUMNS, "since"))
    for model in models:
        began = model.get("since")
        since = "" if began is None else datetime.fromtimestamp(began, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for row in model.get("rows", ()):
            writer.writerow([_cell(model["model"]), *(_cell(row[name]) for name in _COLUMNS), since])
    return text.getvalue()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(_FORMULAS) else text
