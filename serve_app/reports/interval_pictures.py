"""Small pictures of intervals, all on one scale: they need no script, and print as sharp as text."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.reports.differences import FigureDifference

_WIDTH, _HEIGHT = 240, 22
_MARGIN = 8
# A figure that more than doubles would press all others together; its interval ends in an arrow there.
_LOWEST, _HIGHEST = -1.0, 1.0
_LEAST = 0.02
# Nearer together than this, the labels of the scale would run into each other.
_LABEL = 50
_OPENED = f'<svg class="change" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'


@dataclass(frozen=True, slots=True)
class IntervalScale:
    """The horizontal scale of the pictures of one table, in shares of the baseline's value."""

    low: float
    high: float

    @classmethod
    def of(cls, differences: Sequence[FigureDifference]) -> "IntervalScale":
        """A scale that holds zero and these intervals, as far as they are of one order."""
        ends = [0.0]
        for one in differences:
            ends += one.change_interval or (() if one.change is None else (one.change,))
        low, high = max(_LOWEST, min(ends)), min(_HIGHEST, max(ends))
        pad = max(_LEAST, 0.06 * (high - low))
        return cls(low - pad, high + pad)

    def ruler(self) -> str:
        """The scale itself: its ends and zero."""
        labels = []
        for value, anchor in ((self.low, "start"), (0.0, "middle"), (self.high, "end")):
            x = self._x(value)
            if value and abs(x - self._x(0.0)) < _LABEL:
                continue
            text = "0" if value == 0 else f"{100 * value:+.0f} %"
            labels.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
        return f'{_OPENED} aria-hidden="true">{"".join(labels)}</svg>'

    def picture(self, one: FigureDifference) -> str:
        """The interval as a bar with its mean as a dot, beside a line at zero."""
        if one.change is None:
            return ""
        low, high = one.change_interval or (one.change, one.change)
        described = f"{one.change:+.1%}" if low == high else f"{one.change:+.1%}, {low:+.1%} to {high:+.1%}"
        middle = _HEIGHT / 2
        left, right, zero = (self._x(value) for value in (low, high, 0.0))
        shapes = [f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{_HEIGHT}"/>']
        if low != high:
            shapes.append(
                f'<line class="interval" x1="{left:.1f}" x2="{right:.1f}" y1="{middle}" y2="{middle}"/>'
            )
        if low < self.low:
            shapes.append(_arrow(-1))
        if high > self.high:
            shapes.append(_arrow(1))
        if self.low <= one.change <= self.high:
            shapes.append(f'<circle cx="{self._x(one.change):.1f}" cy="{middle}" r="4.5"/>')
        return (
            f'{_OPENED} role="img" aria-label="{described}"><title>{described}</title>{"".join(shapes)}</svg>'
        )

    def _x(self, value: float) -> float:
        within = min(self.high, max(self.low, value))
        return _MARGIN + (within - self.low) / (self.high - self.low) * (_WIDTH - 2 * _MARGIN)


def _arrow(direction: int) -> str:
    """The end of an interval that goes on beyond the scale."""
    tip, middle = (_WIDTH - 1 if direction > 0 else 1), _HEIGHT / 2
    back = tip - direction * 7
    return f'<polygon points="{tip},{middle} {back},{middle - 5} {back},{middle + 5}"/>'
