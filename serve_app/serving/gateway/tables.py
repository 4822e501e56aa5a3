"""CSV tables of costs and usage, for spreadsheets and billing."""

import csv
import io
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

_COLUMNS = ("pool", "class", "tenant", "engine_seconds", "gpu_seconds", "imposed_delay_seconds")
# Spreadsheets evaluate cells that begin with these; clients may choose the names of tenants.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")

USAGE_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")
_USAGE_COLUMNS = ("day", "key", "model", *USAGE_COUNTS, "cost")


def cost_table(models: Iterable[Mapping[str, Any]]) -> str:
    """Return a CSV table with one row per pool, class and tenant; seconds have three decimals.

    `since` is the start of the count in UTC, empty for schedulers of older releases. `gpu_seconds` is empty
    for pools without GPUs. Names that a spreadsheet would evaluate get a leading apostrophe.
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


def usage_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a CSV table of the usage by day, key and model; `cost` is empty for models without prices."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_USAGE_COLUMNS)
    for row in rows:
        cost = "" if row["cost"] is None else f"{row['cost']:.6f}"
        writer.writerow([*(_cell(row[name]) for name in _USAGE_COLUMNS[:-1]), cost])
    return text.getvalue()


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(_FORMULAS) else text
