"""Tables and the chart of this experiment."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from experiments.batch.chart import picture
from experiments.common.rows import Row
from experiments.common.tables import Table, markdown, plus_minus


def _text(rows: Sequence[Row]) -> str:
    head = ["batch", "TTFT P99, s", "TPOT P99, ms", "batch tokens/s", "of batch only", "computed again"]
    only = next((row for row in rows if row.key["case"] == "batch only"), None)
    lines = []
    for row in rows:
        case, found = str(row.key["case"]), row.figures
        tokens = found["batch_tokens_per_s"]
        shares = (
            [mine / most for mine, most in zip(tokens, only.figures["batch_tokens_per_s"], strict=True)]
            if only
            else []
        )
        is_alone, has_batch = case == "batch only", case != "no batch"
        lines.append(
            [
                case,
                "-" if is_alone else plus_minus(found["ttft_p99_s"]),
                "-" if is_alone else plus_minus(found["tpot_p99_s"], 1, scale=1_000),
                plus_minus(tokens, 0) if has_batch else "-",
                plus_minus(shares, 0, scale=100) + " %" if has_batch and not is_alone else "-",
                plus_minus(found["recomputed"], 1, scale=100) + " %" if any(found["revoked"]) else "-",
            ]
        )
    return markdown(head, lines)


_FACTORS = (1.05, 1.1, 1.25, 1.5)


def possible(oracle: Sequence[Row], factor: float, seed: int | None = None) -> float:
    """Return the share of the batch that an oracle serves at a factor of TPOT: linear between its points.

    Beyond its last point it serves no more.

    Args:
        seed: place of a seed; None for means over seeds.
    """

    def of(row: Row, figure: str) -> float:
        values = row.figures[figure]
        return float(fmean(values) if seed is None else values[seed])

    points = [(1.0, 0.0), *sorted((of(row, "tpot_mean_s_factor"), of(row, "share")) for row in oracle)]
    most = 0.0
    for (before, low), (after, high) in pairwise(points):
        if factor <= after:
            return max(most, low + (high - low) * (factor - before) / (after - before))
        most = max(most, high)
    return most


def _frontier(rows: Sequence[Row]) -> str:
    head = ["traffic", "max_slowdown", "TPOT, factor", "TTFT P99, factor", "of batch only", "of the oracle's"]
    lines = []
    for row in rows:
        if row.key["batch"] == "backfill":
            oracle = [
                one
                for one in rows
                if one.key["batch"] == "oracle" and one.key["frontier"] == row.key["frontier"]
            ]
            found = row.figures
            ratios = [
                share / possible(oracle, factor, seed)
                for seed, (share, factor) in enumerate(
                    zip(found["share"], found["tpot_mean_s_factor"], strict=True)
                )
            ]
            lines.append(
                [
                    str(row.key["frontier"]),
                    f"{row.key['slowdown']:g}",
                    plus_minus(found["tpot_mean_s_factor"], 3),
                    plus_minus(found["ttft_p99_s_factor"]),
                    plus_minus(found["share"], 0, scale=100) + " %",
                    plus_minus(ratios),
                ]
            )
    return markdown(head, lines, text_columns=2)


def _oracle(rows: Sequence[Row]) -> str:
    head = ["traffic", *(f"TPOT × {factor:g}" for factor in _FACTORS)]  # noqa: RUF001
    lines = [
        [scene, *(f"{100 * possible(mine, factor):.0f} %" for factor in _FACTORS)]
        for scene in dict.fromkeys(str(row.key["frontier"]) for row in rows)
        for mine in [[row for row in rows if row.key["frontier"] == scene]]
    ]
    return markdown(head, lines)


_FRONTIER = ("70B, long answers", "70B, short answers")
_ENGINES = {"8B": "Llama-3.1-8B on one H100", "70B": "Llama-2-70B on four H100"}

TABLES = {
    name: Table(
        text=_text,
        where={"scene": scene},
        note=f"Simulated, {_ENGINES[scene.split(',')[0]]}, one replica; means over seeds with their 95 % "
        "intervals",
    )
    for name, scene in {
        "long": "8B, long answers",
        "load": "8B, load 0.5",
        "short": "8B, short answers",
        "bursts": "8B, bursts",
        "large-long": "70B, long answers",
        "large-short": "70B, short answers",
    }.items()
}
_SETUP = "Simulated, Llama-2-70B on four H100, load 0.3, one replica"
TABLES |= {
    "frontier": Table(
        text=_frontier,
        where={"frontier": _FRONTIER},
        note=f"{_SETUP}; factors against no batch, means over seeds with their 95 % intervals. "
        "The oracle's share is at the same TPOT",
    ),
    "oracle": Table(
        text=_oracle,
        where={"frontier": _FRONTIER, "batch": "oracle"},
        note=f"{_SETUP}; means over seeds, linear between the points of the oracle",
    ),
}
PICTURES = {"docs/images/batch-frontier.svg": lambda rows_of: picture(rows_of("batch"))}
