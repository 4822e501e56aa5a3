"""Tables of this experiment."""

from experiments.common.rows import ANY
from experiments.common.tables import Column, Computed, Table, line_per_row

_RULES = ("work, reacting", "Serve's default", "fixed, at the peak", "fixed, at the mean")
_HEADLINE_START_S = 120
_HOURS = Column("replica-hours", "all_replica_s", 1, 1 / 3_600)
_COLUMNS = (
    _HOURS,
    Column("in SLO, short, %", "short_attained", 1, 100),
    Column("in SLO, long, %", "long_attained", 1, 100),
    Column("P99 TTFT short, s", "short_ttft_p99_s", 1),
    Column("P99 TTFT long, s", "long_ttft_p99_s", 1),
    Computed(
        "not completed", lambda row: f"{sum(row.figures['not_completed'])} of {sum(row.figures['requests'])}"
    ),
)
_HEADLINE_COLUMNS = (
    _HOURS,
    Column("short in SLO, %", "short_attained", 1, 100),
    Column("long in SLO, %", "long_attained", 1, 100),
    Column("long P99 TTFT, s", "long_ttft_p99_s", 1),
)

_NOTE = "Simulated. SLO: TTFT 1 s for short and 10 s for long prompts, TPOT 0.1 s"
TABLES = {
    "headline": Table(
        text=line_per_row({"traffic": "{case}", "rule": "{rule}"}, _HEADLINE_COLUMNS),
        where={"case": ANY, "start_s": _HEADLINE_START_S, "rule": _RULES},
        note=f"{_NOTE}. Engines start within {_HEADLINE_START_S} s",
    ),
    "all": Table(
        text=line_per_row({"traffic": "{case}", "start, s": "{start_s:g}", "rule": "{rule}"}, _COLUMNS),
        where={"case": ANY, "start_s": ANY, "rule": _RULES},
        note=_NOTE,
    ),
}
