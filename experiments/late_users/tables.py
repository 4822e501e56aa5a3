"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, load_note, markdown, plus_minus

_SHARES = {"requests": "by requests", "tokens": "by tokens (default)", "off": "off: one queue"}


def _headline(rows: Sequence[Row]) -> str:
    head = ["fair shares", "TTFT of the late user, s", "mean TTFT of the first user, s"]
    lines = [
        [
            _SHARES[str(row.key["mode"])],
            plus_minus(row.figures["b_ttft_s"]),
            plus_minus(row.figures["a_ttft_s"]),
        ]
        for row in rows
    ]
    return f"{markdown(head, lines)}\n\n{_circumstances(rows)}"


def _circumstances(rows: Sequence[Row]) -> str:
    settings = rows[0].settings
    return (
        f"{settings['flood']} requests at once, and the late user {settings['after_s']:g} s later. "
        f"{settings['repeats']} repeats. {load_note(rows)}".rstrip()
    )


_NOTE = "Live, with emulated engines. Means with their 95 % intervals"

TABLES = {"headline": Table(text=_headline, note=_NOTE)}
