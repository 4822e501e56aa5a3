"""The tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, load_note, markdown, plus_minus

_COUNTED = {"requests": "in requests", "tokens": "in tokens", "off": "not at all: one queue"}


def _headline(rows: Sequence[Row]) -> str:
    head = ["service is counted", "TTFT of the late user, s", "mean TTFT of the first user, s"]
    lines = [
        [_counted(row), plus_minus(row.figures["b_ttft_s"]), plus_minus(row.figures["a_ttft_s"])]
        for row in rows
    ]
    return f"{markdown(head, lines)}\n\n{_circumstances(rows)}"


def _counted(row: Row) -> str:
    mode = str(row.key["mode"])
    return f"{_COUNTED[mode]} (`{mode}`)"


def _circumstances(rows: Sequence[Row]) -> str:
    settings = rows[0].settings
    return (
        f"{settings['flood']} requests at once, the late user {settings['after_s']:g} s after them; "
        f"{settings['repeats']} repeats. {load_note(rows)}".rstrip()
    )


_NOTE = "Live, emulated engines. Means over the repeats with their 95 % intervals"

TABLES = {"headline": Table(text=_headline, note=_NOTE)}
