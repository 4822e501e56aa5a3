"""Map of all cells as a picture."""

import math
from collections.abc import Sequence

from experiments.common.rows import Row
from experiments.defaults.verdicts import FIGURES, LOSS, Verdict, cells_of, verdict

_TITLES = {"goodput": "requests within the SLO", "short by long P99": "short P99 × long P99 of TTFT"}  # noqa: RUF001
_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP = 190, 78, 132, 40, 14
_ROOT = 'role="img" aria-labelledby="t" font-family="system-ui, sans-serif" font-size="12"'
_STYLE = """<style>
.ground{fill:#fff}text{fill:#1b2430}.on{fill:#1b2430}.small{font-size:10.5px}.bold{font-weight:700}
@media (prefers-color-scheme:dark){.ground{fill:#12161c}text{fill:#e6eaf0}.on{fill:#1b2430}}
</style>"""
# Ratios beyond this have the strongest colour.
_STRONGEST = 2.0
_BETTER, _WORSE, _EQUAL = (94, 160, 214), (238, 145, 70), (243, 244, 246)


def picture(rows: Sequence[Row]) -> str:
    """Return the map as SVG: a line for each scene, a column for each figure and load."""
    cells = cells_of(rows)
    scenes, loads = list(dict.fromkeys(scene for scene, _ in cells)), sorted({load for _, load in cells})
    width = _LEFT + len(FIGURES) * (len(loads) * _WIDTH + _GAP) + 6
    height = _TOP + len(scenes) * _HEIGHT + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_ROOT}>',
        '<title id="t">The defaults against the best other policy, by traffic, engines and load</title>',
        _STYLE,
        f'<rect class="ground" width="{width}" height="{height}" rx="8"/>',
        _text(14, 24, "Ours / best other policy: above 1, the defaults are better", "bold", "start"),
    ]
    for number, scene in enumerate(scenes):
        parts.append(_text(_LEFT - 10, _TOP + number * _HEIGHT + 25, scene, "", "end"))
    for place, figure in enumerate(FIGURES):
        left = _LEFT + place * (len(loads) * _WIDTH + _GAP)
        parts.append(_text(left + len(loads) * _WIDTH // 2, 48, _TITLES[figure], "bold"))
        for column, load in enumerate(loads):
            x = left + column * _WIDTH
            parts.append(_text(x + _WIDTH // 2, 68, f"load {load:g}"))
            for number, scene in enumerate(scenes):
                found = verdict(cells[scene, load], figure)
                parts += _cell(x, _TOP + number * _HEIGHT, found)
    foot = f"Below {LOSS:g} is a loss. Bold: the 95 % interval excludes 1. Of equals, the first is named."
    parts.append(_text(14, height - 16, foot, "small", "start"))
    return "\n".join([*parts, "</svg>", ""])


def _cell(x: int, y: int, found: Verdict) -> list[str]:
    one = found.ratio
    is_sure = one.low is not None and one.high is not None and not one.low <= 1 <= one.high
    number = f"{one.mean:.2f}" if one.mean < 100 else f"{one.mean:.0f}"
    middle, size = x + _WIDTH // 2, f'width="{_WIDTH - 2}" height="{_HEIGHT - 2}"'
    return [
        f'<rect x="{x + 1}" y="{y + 1}" {size} rx="4" fill="{_colour(one.mean)}"/>',
        _text(middle, y + 17, number, "on bold" if is_sure else "on"),
        _text(middle, y + 32, found.best, "on small"),
    ]


def _colour(ratio: float) -> str:
    share = max(-1.0, min(1.0, math.log(ratio) / math.log(_STRONGEST)))
    end = _BETTER if share > 0 else _WORSE
    mixed = (round(low + abs(share) * (high - low)) for low, high in zip(_EQUAL, end, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{text}</text>'
