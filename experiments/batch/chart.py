"""Chart of the frontier."""

from collections.abc import Sequence
from statistics import fmean

from experiments.common.rows import Row

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
        _text(14, 24, "Batch tokens/s, as a share of an engine of its own", "bold", "start"),
        _text(14, height - 14, _LEGEND, "small", "start"),
    ]
    for place, scene in enumerate(scenes):
        mine = [row for row in rows if row.key.get("frontier") == scene]
        parts += _panel(_LEFT + place * (_WIDTH + _GAP), scene, mine)
    return "\n".join([*parts, "</svg>", ""])


_LEGEND = "Dashed: oracle. Dots: max_slowdown, and in brackets the factor of interactive TTFT P99."


def _panel(left: int, title: str, rows: Sequence[Row]) -> list[str]:
    parts = [_text(left + _WIDTH // 2, _TOP - 12, title, "bold")]
    for factor in _GRID:
        x, _ = _at(left, factor, 0.0)
        parts.append(f'<path class="grid" d="M{x} {_TOP}V{_TOP + _HEIGHT}"/>')
        parts.append(_text(x, _TOP + _HEIGHT + 18, f"{factor:.1f}"))
    for share in (0.0, 0.2, 0.4, 0.6, 0.8):
        _, y = _at(left, _FIRST, share)
        parts.append(f'<path class="grid" d="M{left} {y}H{left + _WIDTH}"/>')
        parts.append(_text(left - 8, y + 4, f"{100 * share:.0f} %", "", "end"))
    parts.append(_text(left + _WIDTH // 2, _TOP + _HEIGHT + 38, "factor of interactive TPOT, mean"))
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
                parts.append(_text(x + 8, y + 14, f"{row.key['slowdown']:g} ({ttft:.2f})", "small", "start"))
    return parts


def _point(row: Row) -> tuple[float, float]:
    return fmean(row.figures["tpot_mean_s_factor"]), fmean(row.figures["share"])


def _at(left: int, factor: float, share: float) -> tuple[int, int]:
    x = left + _WIDTH * (factor - _FIRST) / (_LAST - _FIRST)
    return round(x), round(_TOP + _HEIGHT * (1 - share / 0.8))


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{text}</text>'
