"""What was used with each key, as the schedulers of a running application have counted it."""

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.command import say, warn
from serve_app.status import api_key_for, ask, default_url
from serve_app.tables import shown_table

COLUMNS = ("day", "key", "model", "requests", "prompt_tokens", "cached_tokens", "generated_tokens")


def show_usage(args: argparse.Namespace) -> int:
    """Print the ledgers of an application; the exit status is 1 when a scheduler did not answer.

    Raises:
        StatusError: the application does not answer, or refuses.
    """
    url = args.url or default_url()
    models = ask(url, "/debug/usage", api_key_for(url, args.api_key))["models"]
    for model in models:
        if "error" in model:
            warn(f"{model['model']}: {model['error']}")
    rows = [row for model in models for row in model.get("rows", ())]
    rows = sorted((row for row in rows if row["day"] >= (args.since or "")), key=_order)
    if args.json:
        say(json.dumps(rows, indent=1))
    elif args.csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        say(_table(rows))
    return 1 if any("error" in model for model in models) else 0


def _order(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["day"], row["key"], row["model"]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "no request with a key has ended in an engine yet"
    lines = [
        tuple(f"{value:,}" if isinstance(value := row[column], int) else str(value) for column in COLUMNS)
        for row in rows
    ]
    return shown_table([column.replace("_", " ") for column in COLUMNS], lines, text_columns=3)
