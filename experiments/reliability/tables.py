"""Tables of this experiment."""

from experiments.common.rows import Row
from experiments.common.tables import Column, Table, line_per_row

_SHORT = Column("short preempted, per mille", "preempted_short", 1, 1_000)
_LONG = Column("long preempted, per mille", "preempted_long", 1, 1_000)
_REJECTED = Column("rejected, per mille", "rejected_ratio", 2, 1_000)
_LONG_P99 = Column("long p99, s", "long_ttft_p99_s")
_COLUMNS = (
    _SHORT,
    _LONG,
    _REJECTED,
    Column("answers cut, per mille", "clipped_ratio", 2, 1_000),
    Column("short TTFT p99, s", "short_ttft_p99_s"),
    _LONG_P99,
    Column("longest wait, s", "queue_wait_max_s", 1),
    Column("TPOT p99, ms", "tpot_p99_s", 0, 1_000),
    Column("goodput, 1/s", "goodput_per_s", 1),
)


def _control(row: Row) -> str:
    return "router" if row.key["control"] == "router" else "gateway"


_NOTE = "Simulated; fleets of a case have as many GPUs. Means over seeds with their 95 % intervals"

_WHERE = {"load": 0.9, "control": ("router", "gateway, ewsjf")}

TABLES = {
    "headline": Table(
        text=line_per_row(
            {"fleet": "{case}: {fleet}", "control": _control}, (_SHORT, _LONG, _REJECTED, _LONG_P99)
        ),
        where=_WHERE,
        note=f"Load 0.9. {_NOTE}",
    ),
    "all": Table(
        text=line_per_row(
            {"case": "{case}", "load": "{load}", "fleet": "{fleet}", "control": "{control}"}, _COLUMNS
        ),
        where=_WHERE,
        note=_NOTE,
    ),
}
