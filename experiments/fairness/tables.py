"""Tables of this experiment: one for each scene."""

from collections.abc import Callable, Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus

# Heading, figure, decimals.
Columns = Sequence[tuple[str, str, int]]


def _text(first: str, columns: Columns) -> Callable[[Sequence[Row]], str]:
    def text(rows: Sequence[Row]) -> str:
        lines = [
            [str(row.key["variant"]), *(plus_minus(row.figures[name], digits) for _, name, digits in columns)]
            for row in rows
        ]
        return markdown([first, *(heading for heading, _, _ in columns)], lines)

    return text


def _weights(rows: Sequence[Row]) -> str:
    tenants = rows[0].settings["weights"]
    columns = [(f"weight {weight:g}", name, 3) for name, weight in tenants.items()]
    return _text("service", [*columns, ("farthest from 1", "farthest", 3), ("Jain's index", "jain", 3)])(rows)


_RATE = ("tokens/s", "tokens_per_s", 0)
_LIGHT: Columns = [
    ("light: TTFT mean, s", "light_mean_s", 2),
    ("p99, s", "light_p99_s", 2),
    ("heavy: mean, s", "heavy_mean_s", 2),
    ("p99, s", "heavy_p99_s", 2),
    ("Jain's index", "jain", 3),
    _RATE,
]
_LIGHT_HEADLINE: Columns = [
    ("light: TTFT mean, s", "light_mean_s", 2),
    ("light: P99, s", "light_p99_s", 2),
    ("heavy: mean, s", "heavy_mean_s", 2),
    ("heavy: P99, s", "heavy_p99_s", 2),
    _RATE,
]
_TARGETS: Columns = [
    ("new user: TTFT mean, s", "new_mean_s", 2),
    ("p95, s", "new_p95_s", 2),
    ("longest, s", "new_max_s", 2),
    _RATE,
]
_PRIORITY: Columns = [
    ("interactive: TTFT mean, s", "interactive_mean_s", 2),
    ("p95, s", "interactive_p95_s", 2),
    _RATE,
]

_SILENT: Columns = [
    ("short: TTFT mean, s", "short_mean_s", 3),
    ("short: P99, s", "short_p99_s", 2),
    ("long: mean, s", "long_mean_s", 2),
    ("goodput, 1/s", "goodput_per_s", 1),
    ("within SLO", "met_ratio", 3),
]
_SILENT_BURST: Columns = [
    ("burst: TTFT mean, s", "burst_mean_s", 2),
    ("late user after 0.5 s: TTFT, s", "late_0.5_s", 2),
    ("1 s", "late_1_s", 2),
    ("3 s", "late_3_s", 2),
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
    "light": Table(text=_text("service", _LIGHT_HEADLINE), where={"scene": "light"}, note=_LIGHT_NOTE),
    "light-all": Table(text=_text("service", _LIGHT), where={"scene": "light"}, note=_LIGHT_NOTE),
    "targets": Table(
        text=_text("policy, `target_waiting`", _TARGETS),
        where={"scene": "targets"},
        note=f"{_ENGINES}, four replicas, load 1.3, four reports per second; {_MEANS}",
    ),
    "engine-priority": Table(
        text=_text("feedback, `engine_priority`", _PRIORITY),
        where={"scene": "engine-priority"},
        note=f"{_ENGINES}, one replica. Feedback: fresh is 1 ms and 5 reports per second, late is 0.3 s and "
        f"1 report per second; {_MEANS}",
    ),
    "silent": Table(
        text=_text("load, limits", _SILENT),
        where={"scene": "silent"},
        note="Simulated, two engines of an 8B model without metrics. Goodput: within a TTFT of 1 s "
        f"(long 10 s) and 100 ms per output token; {_MEANS}",
    ),
    "silent-burst": Table(
        text=_text("engines, limits", _SILENT_BURST),
        where={"scene": "silent-burst"},
        note=f"Simulated; bursts of 200, 40 and 500 requests; {_MEANS}",
    ),
}
