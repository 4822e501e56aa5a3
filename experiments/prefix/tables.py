"""Tables of this experiment."""

from collections.abc import Sequence

from experiments.common.rows import Row, where
from experiments.common.tables import Table, markdown, plus_minus


def _choices(rows: Sequence[Row]) -> str:
    head = ["load", "choice", "cache hits, %", "TTFT mean, s", "p50, s", "p95, s", "tokens/s"]
    return markdown(head, map(_choice, rows), text_columns=2)


def _choice(row: Row) -> list[str]:
    figures = row.figures
    return [
        str(row.key["load"]),
        str(row.key["choice"]),
        plus_minus(figures["hit_ratio"], 0, scale=100),
        *(plus_minus(figures[f"ttft_{name}_s"], 3) for name in ("mean", "p50", "p95")),
        plus_minus(figures["tokens_per_s"], 0),
    ]


def _headline(rows: Sequence[Row]) -> str:
    head = ["load", "choice of the replica", "cache hits, %", "TTFT mean, s", "TTFT P95, s"]
    lines = []
    for row in rows:
        load, choice, hits, mean, _, p95, _ = _choice(row)
        lines.append([load, _BY_LOAD_OR_PREFIX[choice], hits, mean, p95])
    return markdown(head, lines, text_columns=2)


def _sessions(rows: Sequence[Row]) -> str:
    head = ["replicas", "requests/s", "rule", "TTFT mean, s", "p99, s", "cache hits, %", "ms per token"]
    return markdown(head, [_session_line(row) for row in rows], text_columns=3)


def _session_line(row: Row) -> list[str]:
    figures, replicas = row.figures, int(str(row.key["replicas"]))
    return [
        str(replicas),
        f"{float(str(row.key['rate_per_s'])) * replicas / 4:.1f}",
        str(row.key["rule"]),
        plus_minus(figures["ttft_mean_s"], 3),
        plus_minus(figures["ttft_p99_s"], 2),
        plus_minus(figures["hit_ratio"], 0, scale=100),
        plus_minus(figures["tpot_mean_s"], 1, scale=1_000),
    ]


def _hashing(rows: Sequence[Row]) -> str:
    lines = [[f"{row.key['bytes']:,}", f"{row.figures['us']:,.1f}"] for row in where(rows, cost="hash")]
    return markdown(["bytes of the prompt", "hashing, µs"], lines, text_columns=0)


def _index(rows: Sequence[Row]) -> str:
    lines = [
        [
            f"{row.key['replicas']:,}",
            f"{row.figures['blocks']:,}",
            f"{row.figures['lookup_us']:.1f}",
            f"{row.figures['dispatch_us']:.1f}",
        ]
        for row in rows
    ]
    return markdown(["replicas", "blocks held", "look-up, µs", "dispatch, µs"], lines, text_columns=0)


_NOTE = "Means over seeds with their 95 % intervals; TTFT counts from arrival"
_BY_LOAD_OR_PREFIX = {"ewsjf, by load": "by load", "ewsjf, affinity": "by load and cached prefix"}
_CHOICES = ("round-robin, no gateway", "power of two, no gateway", "ewsjf, by load", "ewsjf, affinity")

TABLES = {
    "headline": Table(text=_headline, where={"choice": tuple(_BY_LOAD_OR_PREFIX)}, note=_NOTE),
    "choices": Table(text=_choices, where={"choice": _CHOICES}, note=_NOTE),
    "code": Table(text=_sessions, where={"workload": "code generation"}, note=_NOTE),
    "reasoning": Table(text=_sessions, where={"workload": "reasoning"}, note=_NOTE),
    "b2b": Table(text=_sessions, where={"workload": "b2b-saas"}, note=_NOTE),
    "hashing": Table(text=_hashing, where={"cost": "hash"}, note="The best of five rounds, on one core"),
    "index": Table(text=_index, where={"cost": "index"}, note="The best of five rounds, on one core"),
}
