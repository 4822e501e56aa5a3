"""Tables of this experiment: one for each case."""

from collections.abc import Callable, Sequence

from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus

# Heading, figure, decimals.
Columns = Sequence[tuple[str, str, int]]


def _text(columns: Columns) -> Callable[[Sequence[Row]], str]:
    def text(rows: Sequence[Row]) -> str:
        lines = [
            [
                f"{row.key['rate']:g}",
                str(row.key["variant"]),
                *(plus_minus(row.figures[name], digits) for _, name, digits in columns),
            ]
            for row in rows
        ]
        return markdown(
            ["requests/s", "variant", *(heading for heading, _, _ in columns)], lines, text_columns=2
        )

    return text


_TOKENS = ("tokens/s", "tokens_per_s", 0)
_GOODPUT = ("goodput", "goodput", 3)
_SHORT_LONG: Columns = [
    ("short TTFT mean, s", "short_mean_s", 2),
    ("short P99, s", "short_p99_s", 2),
    ("long mean, s", "long_mean_s", 2),
    ("long P99, s", "long_p99_s", 2),
]
_KV: Columns = [_GOODPUT, ("preemptions", "preemptions", 0), _TOKENS]
_TENANTS: Columns = [
    ("light TTFT mean, s", "light_mean_s", 2),
    ("light P99, s", "light_p99_s", 2),
    ("light worst, s", "light_max_s", 2),
    ("heavy P99, s", "heavy_p99_s", 1),
]
_OUTPUT_ORDER: Columns = [
    _GOODPUT,
    ("light TTFT mean, s", "light_mean_s", 2),
    ("heavy mean, s", "heavy_mean_s", 2),
    ("heavy worst, s", "heavy_max_s", 1),
]
_BACKLOG: Columns = [_TOKENS, ("interactive TTFT mean, s", "people_mean_s", 2), ("P99, s", "people_p99_s", 2)]

_RETRIES: Columns = [
    ("requests served in the end", "served", 3),
    ("attempts", "attempts", 0),
    ("short TTFT P99, s", "short_p99_s", 2),
    ("long P99, s", "long_p99_s", 2),
]
_CLASSES: Columns = [
    ("default class TTFT mean, s", "program_mean_s", 2),
    ("P99, s", "program_p99_s", 1),
    ("interactive mean, s", "people_mean_s", 2),
    ("P99, s", "people_p99_s", 1),
]

_MEANS = "Simulated; means over seeds with their 95 % intervals"
_70B = "Llama-2-70B on four H100"
_8B = "Llama-3.1-8B on an RTX 4090"

TABLES = {
    "kv": Table(
        text=_text(_KV),
        where={"case": "kv"},
        note=f"{_8B}, one replica, without headroom. Goodput: share of requests within the SLO. {_MEANS}",
    ),
    "tenants": Table(text=_text(_TENANTS), where={"case": "tenants"}, note=f"{_8B}, one replica. {_MEANS}"),
    "output-order": Table(
        text=_text(_OUTPUT_ORDER), where={"case": "order by output"}, note=f"{_8B}, one replica. {_MEANS}"
    ),
    "long-prompts": Table(
        text=_text(_SHORT_LONG),
        where={"case": "long prompts"},
        note=f"{_70B}, two replicas. Short: up to 2,048 tokens. {_MEANS}",
    ),
    "mixed": Table(text=_text(_SHORT_LONG), where={"case": "mixed"}, note=f"{_8B}, two replicas. {_MEANS}"),
    "mixed-all": Table(
        text=_text([*_SHORT_LONG, _GOODPUT]), where={"case": "mixed"}, note=f"{_8B}, two replicas. {_MEANS}"
    ),
    "backlog": Table(
        text=_text(_BACKLOG),
        where={"case": ("backlog", "long backlog")},
        note=f"{_70B}, four replicas, two for long prompts. Tokens over the time until the last request "
        f"ends. {_MEANS}",
    ),
    "retries": Table(
        text=_text(_RETRIES),
        where={"case": "retries"},
        note=f"{_70B}, four replicas, a queue timeout of 5 s. {_MEANS}",
    ),
    "classes": Table(
        text=_text(_CLASSES), where={"case": "classes"}, note=f"{_70B}, four replicas. {_MEANS}"
    ),
    "mechanisms": Table(
        text=_text([*_SHORT_LONG, _GOODPUT, _TOKENS]),
        where={"case": "mechanisms"},
        note=f"{_70B}, four replicas. {_MEANS}",
    ),
}
