"""Tables and the chart of this experiment."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

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


# The chart of the frontier

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 330, 300, 58, 62, 70
_FIRST, _LAST, _GRID = 1.0, 1.8, (1.0, 1.2, 1.4, 1.6, 1.8)
_ROOT = 'role="img" aria-labelledby="t" font-family="system-ui, sans-serif" font-size="12"'
_STYLE = """<style>
.ground{fill:#fff}text{fill:#1b2430}.grid{stroke:#d9dde3}.small{font-size:10.5px}.bold{font-weight:600}
.line{fill:none;stroke-width:2}.oracle{stroke:#8d97a5;stroke-dasharray:5 4}.backfill{stroke:#1f5fbf}
.dot{fill:#1f5fbf}
@media (prefers-color-scheme:dark){.ground{fill:#12161c}text{fill:#e6eaf0}.grid{stroke:#3a4350}
.oracle{stroke:#a3adbb}.backfill{stroke:#7fb0ff}.dot{fill:#7fb0ff}}
</style>"""


def picture(rows: Sequence[Row]) -> str:
    """Return a chart for each scene as SVG: the batch's throughput by the TPOT of the others."""
    scenes = list(dict.fromkeys(str(row.key["frontier"]) for row in rows if "frontier" in row.key))
    width, height = _LEFT + len(scenes) * (_WIDTH + _GAP), _TOP + _HEIGHT + 76
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_ROOT}>',
        '<title id="t">Throughput of a batch by the slow-down of interactive requests</title>',
        _STYLE,
        f'<rect class="ground" width="{width}" height="{height}" rx="8"/>',
        _text_at(14, 24, "Batch tokens/s, as a share of an engine of its own", "bold", "start"),
        _text_at(14, height - 14, _LEGEND, "small", "start"),
    ]
    for place, scene in enumerate(scenes):
        mine = [row for row in rows if row.key.get("frontier") == scene]
        parts += _panel(_LEFT + place * (_WIDTH + _GAP), scene, mine)
    return "\n".join([*parts, "</svg>", ""])


_LEGEND = "Dashed: oracle. Dots: max_slowdown, and in brackets the factor of interactive TTFT P99."


def _panel(left: int, title: str, rows: Sequence[Row]) -> list[str]:
    parts = [_text_at(left + _WIDTH // 2, _TOP - 12, title, "bold")]
    for factor in _GRID:
        x, _ = _at(left, factor, 0.0)
        parts.append(f'<path class="grid" d="M{x} {_TOP}V{_TOP + _HEIGHT}"/>')
        parts.append(_text_at(x, _TOP + _HEIGHT + 18, f"{factor:.1f}"))
    for share in (0.0, 0.2, 0.4, 0.6, 0.8):
        _, y = _at(left, _FIRST, share)
        parts.append(f'<path class="grid" d="M{left} {y}H{left + _WIDTH}"/>')
        parts.append(_text_at(left - 8, y + 4, f"{100 * share:.0f} %", "", "end"))
    parts.append(_text_at(left + _WIDTH // 2, _TOP + _HEIGHT + 38, "factor of interactive TPOT, mean"))
    for batch in ("oracle", "backfill"):
        points = sorted(
            ((_point(row), row) for row in rows if row.key["batch"] == batch), key=lambda one: one[0]
        )
        shown = [(_at(left, *point), row) for point, row in points if point[0] <= _LAST]
        path = "L".join(f"{x} {y}" for (x, y), _ in shown)
        parts.append(f'<path class="line {batch}" d="M{path}"/>')
        if batch == "backfill":
            for (x, y), row in shown:
                ttft = fmean(row.figures["ttft_p99_s_factor"])
                parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="4"/>')
                parts.append(
                    _text_at(x + 8, y + 14, f"{row.key['slowdown']:g} ({ttft:.2f})", "small", "start")
                )
    return parts


def _point(row: Row) -> tuple[float, float]:
    return fmean(row.figures["tpot_mean_s_factor"]), fmean(row.figures["share"])


def _at(left: int, factor: float, share: float) -> tuple[int, int]:
    x = left + _WIDTH * (factor - _FIRST) / (_LAST - _FIRST)
    return round(x), round(_TOP + _HEIGHT * (1 - share / 0.8))


def _text_at(x: int, y: int, text: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{text}</text>'


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
