"""Tables of this experiment."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from experiments.common.rows import ANY, Row, where
from experiments.common.tables import Column, Computed, Table, line_per_row, markdown
from experiments.placement.speeds import KNOWN, LEARNED

_HITS = Column("cache hits, %", "hit_ratio", 0, 100)
_MEAN, _P95 = Column("TTFT mean, s", "ttft_mean_s", 3), Column("p95, s", "ttft_p95_s", 3)
_CHOICE_COLUMNS = (
    _HITS,
    _MEAN,
    Column("p50, s", "ttft_p50_s", 3),
    _P95,
    Column("tokens/s", "tokens_per_s", 0),
)
_SESSION_COLUMNS = (
    _MEAN,
    Column("p99, s", "ttft_p99_s"),
    _HITS,
    Column("ms per token", "tpot_mean_s", 1, 1_000),
)
_INDEX_COLUMNS = (
    Computed("blocks held", lambda row: f"{row.figures['blocks']:,}"),
    Computed("look-up, µs", lambda row: f"{row.figures['lookup_us']:.1f}"),
    Computed("dispatch, µs", lambda row: f"{row.figures['dispatch_us']:.1f}"),
)
_HASHING = Computed("hashing, µs", lambda row: f"{row.figures['us']:,.1f}")


_SPEED_COLUMNS = (
    _MEAN,
    Column("P99, s", "ttft_p99_s", 3),
    Column("end-to-end mean, s", "e2e_mean_s", 3),
    Column("on slow replicas, %", "slow_ratio", 0, 100),
)


def _rate(row: Row) -> str:
    """Return the requests per second of a fleet; keys have those of four replicas."""
    return f"{float(row.key['rate_per_s']) * float(row.key['replicas']) / 4:.1f}"


_SESSIONS = line_per_row({"replicas": "{replicas}", "requests/s": _rate, "rule": "{rule}"}, _SESSION_COLUMNS)
_NOTE = "Means over seeds with their 95 % intervals; TTFT counts from arrival"
_COST_NOTE = "The best of five rounds, on one core"
_BY_LOAD_OR_PREFIX = {"ewsjf, by load": "by load", "ewsjf, affinity": "by load and cached prefix"}


def _ratios(rows: Sequence[Row]) -> str:
    head = ["requests", "metrics", "load", "TTFT mean", "P99", "end-to-end mean"]
    compared, lines = ("ttft_mean_s", "ttft_p99_s", "e2e_mean_s"), []
    for row in where(rows, variant=LEARNED):
        (known,) = where(rows, **{**row.key, "variant": KNOWN})
        ratios = (fmean(row.figures[name]) / fmean(known.figures[name]) for name in compared)
        metrics = "yes" if row.key["metrics"] else "no"
        lines.append(
            [str(row.key["workload"]), metrics, str(row.key["load"]), *(f"{each:.2f}" for each in ratios)]
        )
    return markdown(head, lines, text_columns=3)


_BY_LOAD = line_per_row({"load": "{load}", "choice": "{variant}"}, _SPEED_COLUMNS)

TABLES = {
    "headline": Table(
        text=line_per_row(
            {
                "load": "{load}",
                "choice of the replica": lambda row: _BY_LOAD_OR_PREFIX[str(row.key["choice"])],
            },
            (_HITS, _MEAN, replace(_P95, heading="TTFT P95, s")),
        ),
        where={"choice": tuple(_BY_LOAD_OR_PREFIX)},
        note=_NOTE,
    ),
    "choices": Table(
        text=line_per_row({"load": "{load}", "choice": "{choice}"}, _CHOICE_COLUMNS),
        where={"choice": ANY},
        note=_NOTE,
    ),
    "code": Table(text=_SESSIONS, where={"part": "affinity", "workload": "code generation"}, note=_NOTE),
    "reasoning": Table(text=_SESSIONS, where={"part": "affinity", "workload": "reasoning"}, note=_NOTE),
    "b2b": Table(text=_SESSIONS, where={"part": "affinity", "workload": "b2b-saas"}, note=_NOTE),
    "hashing": Table(
        text=line_per_row({"bytes of the prompt": "{bytes:,}"}, [_HASHING], text_columns=0),
        where={"cost": "hash"},
        note=_COST_NOTE,
    ),
    "index": Table(
        text=line_per_row({"replicas": "{replicas:,}"}, _INDEX_COLUMNS, text_columns=0),
        where={"cost": "index"},
        note=_COST_NOTE,
    ),
    "speeds": Table(
        text=_ratios, where={"part": "speeds"}, note="Learned relative to known speeds, means over seeds"
    ),
    **{
        f"speeds-{name}{suffix}": Table(
            text=_BY_LOAD, where={"part": "speeds", "workload": workload, "metrics": metrics}, note=_NOTE
        )
        for name, workload in (("paper", "paper-mix"), ("code", "code generation"))
        for suffix, metrics in (("", True), ("-blind", False))
    },
}
