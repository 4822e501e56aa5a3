"""Tables of this experiment: one for each case."""

from experiments.common.tables import Column, Table, line_per_row

_TOKENS = Column("tokens/s", "tokens_per_s", 0)
_GOODPUT = Column("goodput", "goodput", 3)
_SHORT_LONG = (
    Column("short TTFT mean, s", "short_mean_s"),
    Column("short P99, s", "short_p99_s"),
    Column("long mean, s", "long_mean_s"),
    Column("long P99, s", "long_p99_s"),
)
_LIGHT_MEAN = Column("light TTFT mean, s", "light_mean_s")
_70B = "Llama-2-70B on four H100"
_8B = "Llama-3.1-8B on an RTX 4090"


def _table(case: str | tuple[str, ...], note: str, *columns: Column) -> Table:
    return Table(
        text=line_per_row({"requests/s": "{rate:g}", "variant": "{variant}"}, columns),
        where={"case": case},
        note=f"{note}. Simulated; means over seeds with their 95 % intervals",
    )


TABLES = {
    "kv": _table(
        "kv",
        f"{_8B}, one replica, without headroom. Goodput: share of requests within the SLO",
        _GOODPUT,
        Column("preemptions", "preemptions", 0),
        _TOKENS,
    ),
    "tenants": _table(
        "tenants",
        f"{_8B}, one replica",
        _LIGHT_MEAN,
        Column("light P99, s", "light_p99_s"),
        Column("light worst, s", "light_max_s"),
        Column("heavy P99, s", "heavy_p99_s", 1),
    ),
    "output-order": _table(
        "order by output",
        f"{_8B}, one replica",
        _GOODPUT,
        _LIGHT_MEAN,
        Column("heavy mean, s", "heavy_mean_s"),
        Column("heavy worst, s", "heavy_max_s", 1),
    ),
    "long-prompts": _table("long prompts", f"{_70B}, two replicas. Short: up to 2,048 tokens", *_SHORT_LONG),
    "mixed": _table("mixed", f"{_8B}, two replicas", *_SHORT_LONG),
    "mixed-all": _table("mixed", f"{_8B}, two replicas", *_SHORT_LONG, _GOODPUT),
    "backlog": _table(
        ("backlog", "long backlog"),
        f"{_70B}, four replicas, two for long prompts. Tokens over the time until the last request ends",
        _TOKENS,
        Column("interactive TTFT mean, s", "people_mean_s"),
        Column("P99, s", "people_p99_s"),
    ),
    "retries": _table(
        "retries",
        f"{_70B}, four replicas, a queue timeout of 5 s",
        Column("requests served in the end", "served", 3),
        Column("attempts", "attempts", 0),
        Column("short TTFT P99, s", "short_p99_s"),
        Column("long P99, s", "long_p99_s"),
    ),
    "classes": _table(
        "classes",
        f"{_70B}, four replicas",
        Column("default class TTFT mean, s", "program_mean_s"),
        Column("P99, s", "program_p99_s", 1),
        Column("interactive mean, s", "people_mean_s"),
        Column("P99, s", "people_p99_s", 1),
    ),
    "mechanisms": _table("mechanisms", f"{_70B}, four replicas", *_SHORT_LONG, _GOODPUT, _TOKENS),
}
