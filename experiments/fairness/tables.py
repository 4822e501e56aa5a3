"""Tables of this experiment: one for each scene."""

from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.common.tables import Column, Table, line_per_row


def _weights(rows: Sequence[Row]) -> str:
    tenants = rows[0].settings["weights"]
    columns = [Column(f"weight {weight:g}", name, 3) for name, weight in tenants.items()]
    return line_per_row(
        {"service": "{variant}"}, [*columns, Column("farthest from 1", "farthest", 3), _JAIN]
    )(rows)


_JAIN = Column("Jain's index", "jain", 3)
_RATE = Column("tokens/s", "tokens_per_s", 0)
_LIGHT_MEAN = Column("light: TTFT mean, s", "light_mean_s")
_HEAVY_MEAN = Column("heavy: mean, s", "heavy_mean_s")
_ENGINES = "Simulated, Llama-2-70B on four H100"
_MEANS = "means over seeds with their 95 % intervals"
_LIGHT_NOTE = f"{_ENGINES}, four replicas, load 1.3"


def _table(scene: str, first: str, note: str, *columns: Column) -> Table:
    return Table(
        text=line_per_row({first: "{variant}"}, columns), where={"scene": scene}, note=f"{note}; {_MEANS}"
    )


TABLES = {
    "weights": Table(
        text=_weights,
        where={"scene": "weights"},
        note=f"Service over the share by weight; 1 is exactly the share. {_ENGINES}, "
        f"four replicas, load 3; {_MEANS}",
    ),
    "light": _table(
        "light",
        "service",
        _LIGHT_NOTE,
        _LIGHT_MEAN,
        Column("light: P99, s", "light_p99_s"),
        _HEAVY_MEAN,
        Column("heavy: P99, s", "heavy_p99_s"),
        _RATE,
    ),
    "light-all": _table(
        "light",
        "service",
        _LIGHT_NOTE,
        _LIGHT_MEAN,
        Column("p99, s", "light_p99_s"),
        _HEAVY_MEAN,
        Column("p99, s", "heavy_p99_s"),
        _JAIN,
        _RATE,
    ),
    "bursts": _table(
        "bursts",
        "load, service",
        "Simulated, Llama-3.1-8B on an RTX 4090, one replica",
        _LIGHT_MEAN,
        Column("light: P99, s", "light_p99_s"),
        Column("worst light tenant: P99, s", "light_worst_p99_s"),
        _HEAVY_MEAN,
        Column("heavy: P99, s", "heavy_p99_s"),
    ),
    "targets": _table(
        "targets",
        "policy, `target_waiting`",
        f"{_ENGINES}, four replicas, load 1.3, four reports per second",
        Column("new user: TTFT mean, s", "new_mean_s"),
        Column("p95, s", "new_p95_s"),
        Column("longest, s", "new_max_s"),
        _RATE,
    ),
    "engine-priority": _table(
        "engine-priority",
        "feedback, `engine_priority`",
        f"{_ENGINES}, one replica. Feedback: fresh is 1 ms and 5 reports per second, late is 0.3 s and "
        "1 report per second",
        Column("interactive: TTFT mean, s", "interactive_mean_s"),
        Column("p95, s", "interactive_p95_s"),
        _RATE,
    ),
    "silent": _table(
        "silent",
        "load, limits",
        "Simulated, two engines of an 8B model without metrics. Goodput: within a TTFT of 1 s "
        "(long 10 s) and 100 ms per output token",
        Column("short: TTFT mean, s", "short_mean_s", 3),
        Column("short: P99, s", "short_p99_s"),
        Column("long: mean, s", "long_mean_s"),
        Column("goodput, 1/s", "goodput_per_s", 1),
        Column("within SLO", "met_ratio", 3),
    ),
    "silent-burst": _table(
        "silent-burst",
        "engines, limits",
        "Simulated; bursts of 200, 40 and 500 requests",
        Column("burst: TTFT mean, s", "burst_mean_s"),
        Column("late user after 0.5 s: TTFT, s", "late_0.5_s"),
        Column("1 s", "late_1_s"),
        Column("3 s", "late_3_s"),
    ),
}
