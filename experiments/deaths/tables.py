"""The table of this experiment."""

from collections.abc import Sequence

from experiments.common.audit import ENDS
from experiments.common.rows import Row
from experiments.common.tables import Table, load_note, markdown


def _table(rows: Sequence[Row]) -> str:
    head = ["process", "signal", "times", "requests", *ENDS, "answered twice", "whole after, s: p50", "worst"]
    return f"{markdown(head, map(_line, rows), text_columns=2)}\n\n{load_note(rows)}".rstrip()


def _line(row: Row) -> list[str]:
    figures = row.figures
    back = sorted(seconds for seconds in figures["back_s"] if seconds is not None)
    whole = len(back) == len(figures["back_s"])
    return [
        str(row.key["kind"]),
        f"SIG{row.key['signal']}",
        str(figures["deaths"]),
        f"{figures['sent']:,}",
        *(f"{figures['ends'][end]:,}" for end in ENDS),
        str(figures["answered_twice"]),
        f"{back[len(back) // 2]:.1f}" if back else "-",
        f"{back[-1]:.1f}" if whole and back else "never",
    ]


TABLES = {"headline": Table(text=_table, note="Live, emulated engines, one run of each kind")}
