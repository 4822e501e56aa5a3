"""Tables of this experiment: one for each scene."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Column, Table, line_per_row


def _weights(rows: Sequence[Row]) -> str:
    tenants = rows[0].settings["weights"]
    columns = [Column(f"weight {weight:g}", name, 3) for name, weight in tenants.items()]
    return line_per_row(
        {"service": _VARIANT},
        [*columns, Column("farthest from 1", "farthest", 3), Column("Jain's index", "jain", 3)],
    )(rows)


_VARIANT = "{variant}"
_RATE = Column("tokens/s", "tokens_per_s", 0)
_LIGHT = [
    Column("light: TTFT mean, s", "light_mean_s"),
    Column("p99, s", "light_p99_s"),
    Column("heavy: mean, s", "heavy_mean_s"),
    Column("p99, s", "heavy_p99_s"),
    Column("Jain's index", "jain", 3),
    _RATE,
]
_LIGHT_HEADLINE = [
    Column("light: TTFT mean, s", "light_mean_s"),
    Column("light: P99, s", "light_p99_s"),
    Column("heavy: mean, s", "heavy_mean_s"),
    Column("heavy: P99, s", "heavy_p99_s"),
    _RATE,
]
_TARGETS = [
    Column("new user: TTFT mean, s", "new_mean_s"),
    Column("p95, s", "new_p95_s"),
    Column("longest, s", "new_max_s"),
    _RATE,
]
_PRIORITY = [
    Column("interactive: TTFT mean, s", "interactive_mean_s"),
    Column("p95, s", "interactive_p95_s"),
    _RATE,
]

_SILENT = [
    Column("short: TTFT mean, s", "short_mean_s", 3),
    Column("short: P99, s", "short_p99_s"),
    Column("long: mean, s", "long_mean_s"),
    Column("goodput, 1/s", "goodput_per_s", 1),
    Column("within SLO", "met_ratio", 3),
]
_SILENT_BURST = [
    Column("burst: TTFT mean, s", "burst_mean_s"),
    Column("late user after 0.5 s: TTFT, s", "late_0.5_s"),
    Column("1 s", "late_1_s"),
    Column("3 s", "late_3_s"),
]

_ENGINES = "Simulated, Llama-2-70B on four H100"
_MEANS = "means over seeds with their 95 % intervals"
_LIGHT_NOTE = f"{_ENGINES}, four replicas, load 1.3; {_MEANS}"

TABLES = {
    "weights": Table(
        text=_weights,
        where={"scene": "weights"},
        note=f"Service over the share by weight; 1 is exactly the share. {_ENGINES}, "
        f"four replicas, load 3; {_MEANS}",
    ),
    "light": Table(
        text=line_per_row({"service": _VARIANT}, _LIGHT_HEADLINE), where={"scene": "light"}, note=_LIGHT_NOTE
    ),
    "light-all": Table(
        text=line_per_row({"service": _VARIANT}, _LIGHT), where={"scene": "light"}, note=_LIGHT_NOTE
    ),
    "targets": Table(
        text=line_per_row({"policy, `target_waiting`": _VARIANT}, _TARGETS),
        where={"scene": "targets"},
        note=f"{_ENGINES}, four replicas, load 1.3, four reports per second; {_MEANS}",
    ),
    "engine-priority": Table(
        text=line_per_row({"feedback, `engine_priority`": _VARIANT}, _PRIORITY),
        where={"scene": "engine-priority"},
        note=f"{_ENGINES}, one replica. Feedback: fresh is 1 ms and 5 reports per second, late is 0.3 s and "
        f"1 report per second; {_MEANS}",
    ),
    "silent": Table(
        text=line_per_row({"load, limits": _VARIANT}, _SILENT),
        where={"scene": "silent"},
        note="Simulated, two engines of an 8B model without metrics. Goodput: within a TTFT of 1 s "
        f"(long 10 s) and 100 ms per output token; {_MEANS}",
    ),
    "silent-burst": Table(
        text=line_per_row({"engines, limits": _VARIANT}, _SILENT_BURST),
        where={"scene": "silent-burst"},
        note=f"Simulated; bursts of 200, 40 and 500 requests; {_MEANS}",
    ),
}
