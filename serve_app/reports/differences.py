"""The difference of a candidate from a baseline in one figure, and what may be said about it.

Nothing is called better or worse unless the 95 % interval of the paired difference leaves out zero. Each
interval stands for its own figure: of twenty figures that do not differ, one may look as if it did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from serve_app.metrics.confidence import paired_difference_95


class Judgement(StrEnum):
    """What an interval says."""

    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "no clear difference"
    UNKNOWN = "no interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureDifference:
    """One figure of a candidate and of its baseline.

    Attributes:
        figure: its name, with its unit.
        base, other: at the baseline and at the candidate.
        difference: other minus base.
        low, high: the 95 % interval of the difference; None when nothing tells it.
        lower_is_better: whether less of it is good.
        decimals, scale, unit: how its values are written: times `scale`, with so many decimals.
    """

    figure: str
    base: float
    other: float
    difference: float
    low: float | None
    high: float | None
    lower_is_better: bool = True
    decimals: int = 2
    scale: float = 1.0
    unit: str = ""

    @property
    def judgement(self) -> Judgement:
        """Better or worse only where the interval leaves out zero."""
        if self.low is None or self.high is None:
            return Judgement.UNKNOWN
        if self.low <= 0 <= self.high:
            return Judgement.UNCLEAR
        return Judgement.BETTER if (self.high < 0) is self.lower_is_better else Judgement.WORSE

    @property
    def change(self) -> float | None:
        """The difference as a share of the baseline; None when that is zero."""
        return self.difference / self.base if self.base else None

    @property
    def change_interval(self) -> tuple[float, float] | None:
        """The interval as shares of the baseline's value.

        Times and the like cannot fall by more than all, whatever a symmetric interval says.
        """
        if not self.base or self.low is None or self.high is None:
            return None
        low, high = self.low / self.base, self.high / self.base
        return (max(-1.0, low), high) if self.lower_is_better and self.base > 0 else (low, high)

    def written(self, value: float, *, signed: bool = False) -> str:
        """A value of this figure as text."""
        sign = "+" if signed else ""
        return f"{self.scale * value:{sign},.{self.decimals}f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedFigure:
    """Values of one figure on the same seeds, for a baseline and for a candidate; None where one has none."""

    figure: str
    base: Sequence[float | None]
    other: Sequence[float | None]
    lower_is_better: bool = True
    decimals: int = 2
    unit: str = ""

    def difference(self) -> FigureDifference | None:
        """Over the seeds that both have a value for; None without any."""
        pairs = [
            (mine, theirs)
            for theirs, mine in zip(self.base, self.other, strict=True)
            if mine is not None and theirs is not None
        ]
        if not pairs:
            return None
        other, base = zip(*pairs, strict=True)
        found = paired_difference_95(other, base)
        return FigureDifference(
            figure=self.figure,
            base=sum(base) / len(base),
            other=sum(other) / len(other),
            difference=found.mean,
            low=found.low,
            high=found.high,
            lower_is_better=self.lower_is_better,
            decimals=self.decimals,
            unit=self.unit,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """What the intervals come from, and how a reader gets more of it.

    Attributes:
        count: how many there are.
        one, several: what one is called, and what several are called.
        more: what to do for narrower intervals.
    """

    count: int
    one: str
    several: str
    more: str

    @property
    def text(self) -> str:
        """The number with its noun."""
        return f"{self.count} {self.one if self.count == 1 else self.several}"


def verdict_of(base: str, other: str, differences: Sequence[FigureDifference], sample: Sample) -> str:
    """What the figures say about a candidate, in one sentence."""
    found = {judgement: [one for one in differences if one.judgement is judgement] for judgement in Judgement}
    if not differences:
        return f"{other} and {base} have no figure in common, so nothing can be said about them."
    if len(found[Judgement.UNKNOWN]) == len(differences):
        listed = "; ".join(map(_with_change, differences))
        return (
            f"{other} against {base} on {sample.text}, which gives no interval, so any of this may be "
            f"chance: {listed}. To tell, {sample.more}."
        )
    clear = [
        f"{judgement.value} in {', '.join(map(_with_change, found[judgement]))}"
        for judgement in (Judgement.BETTER, Judgement.WORSE)
        if found[judgement]
    ]
    if not clear:
        return (
            f"No difference between {other} and {base} that {sample.text} can show; for more, {sample.more}."
        )
    unclear = found[Judgement.UNCLEAR] + found[Judgement.UNKNOWN]
    rest = f"; no difference that {sample.text} can show in {', '.join(one.figure for one in unclear)}"
    return f"{other} against {base} is {'; '.join(clear)}{rest if unclear else ''}."


def _with_change(one: FigureDifference) -> str:
    change, interval = one.change, one.change_interval
    if change is None:
        return f"{one.figure} ({one.written(one.base)} to {one.written(one.other)})"
    if interval is None:
        return f"{one.figure} ({_percent(change)})"
    return f"{one.figure} ({_percent(change)}; 95 %: {_percent(interval[0])} to {_percent(interval[1])})"


def _percent(share: float) -> str:
    return f"{100 * share:+.{0 if abs(share) >= 0.1 else 1}f} %"
