"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Column, Table, line_per_row, load_note

_SHARES = {"requests": "by requests", "tokens": "by tokens (default)", "off": "off: one queue"}


def _circumstances(rows: Sequence[Row]) -> str:
    settings = rows[0].settings
    return (
        f"{settings['flood']} requests at once, and the late user {settings['after_s']:g} s later. "
        f"{settings['repeats']} repeats. {load_note(rows)}".rstrip()
    )


_TEXT = line_per_row(
    {"fair shares": lambda row: _SHARES[str(row.key["mode"])]},
    (
        Column("TTFT of the late user, s", "b_ttft_s"),
        Column("mean TTFT of the first user, s", "a_ttft_s"),
    ),
)
_NOTE = "Live, with emulated engines. Means with their 95 % intervals"

TABLES = {"headline": Table(text=lambda rows: f"{_TEXT(rows)}\n\n{_circumstances(rows)}", note=_NOTE)}
