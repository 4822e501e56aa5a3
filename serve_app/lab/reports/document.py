"""Elements of a report: facts, a verdict, and sections of tables and plots.

A figure is called better or worse only if the 95 % interval of the paired difference excludes zero. Each
interval is for a single figure: of twenty figures that do not differ, one may appear to.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serve_app.core.metrics.confidence import ConfidenceInterval, paired_difference_95
from serve_app.lab.reports.tables import table_text


class Judgement(StrEnum):
    """Judgement of a difference by its interval."""

    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "no clear difference"
    UNKNOWN = "no interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureDifference:
    """One figure of a candidate and of its baseline.

    Attributes:
        figure: its name, with its unit.
        base, other: value of the baseline and of the candidate.
        difference: other minus base.
        low, high: the 95 % interval of the difference; None if unknown.
        lower_is_better: whether a lower value is better.
        decimals, scale, unit: format of its values: times `scale`, with that many decimals.
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
        """Better or worse only if the interval excludes zero."""
        if self.low is None or self.high is None:
            return Judgement.UNKNOWN
        if self.low <= 0 <= self.high:
            return Judgement.UNCLEAR
        return Judgement.BETTER if (self.high < 0) is self.lower_is_better else Judgement.WORSE

    @property
    def change(self) -> float | None:
        """The difference as a share of the baseline; None if that is zero."""
        return self.difference / self.base if self.base else None

    @property
    def change_interval(self) -> tuple[float, float] | None:
        """The interval as shares of the baseline's value.

        A reduction is capped at 100 %, whatever a symmetric interval gives.
        """
        if not self.base or self.low is None or self.high is None:
            return None
        low, high = self.low / self.base, self.high / self.base
        return (max(-1.0, low), high) if self.lower_is_better and self.base > 0 else (low, high)

    def written(self, value: float, *, signed: bool = False) -> str:
        """Format a value of this figure."""
        sign = "+" if signed else ""
        return f"{self.scale * value:{sign},.{self.decimals}f}"


def paired_difference(
    base: Sequence[float | None], other: Sequence[float | None], **figure: Any
) -> FigureDifference | None:
    """Return the difference over the seeds with both values, or None without any.

    Args:
        base, other: values of the baseline and of the candidate on the same seeds; None if one has none.
        figure: name and format, as in `FigureDifference`.
    """
    pairs = [(b, o) for b, o in zip(base, other, strict=True) if b is not None and o is not None]
    if not pairs:
        return None
    of_base, of_other = zip(*pairs, strict=True)
    found = paired_difference_95(of_other, of_base)
    return FigureDifference(
        base=sum(of_base) / len(pairs),
        other=sum(of_other) / len(pairs),
        difference=found.mean,
        low=found.low,
        high=found.high,
        **figure,
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """The sample behind the intervals, and how to enlarge it.

    Attributes:
        singular, plural: its noun.
        advice: how to get narrower intervals.
    """

    count: int
    singular: str
    plural: str
    advice: str

    @property
    def text(self) -> str:
        """The number with its noun."""
        return f"{self.count} {self.singular if self.count == 1 else self.plural}"


def verdict_of(base: str, other: str, differences: Sequence[FigureDifference], sample: Sample) -> str:
    """Summarise the figures of a candidate in one sentence."""
    found = {judgement: [one for one in differences if one.judgement is judgement] for judgement in Judgement}
    if not differences:
        return f"{other} and {base} have no metric in common and cannot be compared."
    if len(found[Judgement.UNKNOWN]) == len(differences):
        listed = "; ".join(map(_with_change, differences))
        return (
            f"{other} against {base} with {sample.text}, which gives no confidence interval, so the "
            f"differences may be chance: {listed}. For intervals, {sample.advice}."
        )
    clear = [
        f"{judgement.value} in {', '.join(map(_with_change, found[judgement]))}"
        for judgement in (Judgement.BETTER, Judgement.WORSE)
        if found[judgement]
    ]
    if not clear:
        return (
            f"No significant difference between {other} and {base} with {sample.text}; for narrower "
            f"intervals, {sample.advice}."
        )
    unclear = found[Judgement.UNCLEAR] + found[Judgement.UNKNOWN]
    rest = f"; no significant difference with {sample.text} in {', '.join(one.figure for one in unclear)}"
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


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure in a table.

    Attributes:
        value: unrounded value, for programs that read the page.
    """

    text: str
    value: float | None = None


def interval_cell(interval: ConfidenceInterval | None, decimals: int, scale: float = 1.0) -> Cell:
    """Format a mean with half the width of its interval, or a dash."""
    if interval is None:
        return Cell("-")
    return Cell(interval.as_text(decimals, scale), interval.mean)


def number_cell(value: float | None, decimals: int = 0, scale: float = 1.0) -> Cell:
    """Format a number, or a dash."""
    return Cell("-") if value is None else Cell(f"{scale * value:,.{decimals}f}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table.

    Attributes:
        caption: description of its figures.
        text_columns: number of leading columns with text; the others have figures.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    text_columns: int = 1

    def as_text(self) -> str:
        """Return the table for a terminal, without its caption."""
        lines = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in self.rows]
        return table_text(self.head, lines, text_columns=self.text_columns, key_columns=self.text_columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceTable:
    """Differences of one candidate from a baseline, each with a picture of its interval."""

    caption: str
    base: str
    other: str
    differences: Sequence[FigureDifference]

    def as_text(self) -> str:
        """Return the differences for a terminal, in words instead of pictures."""
        names = [", ".join(filter(None, (one.figure, one.unit))) for one in self.differences]
        rows = [
            [name, *(cell.text for cell in figures_of(one)), one.judgement.value]
            for name, one in zip(names, self.differences, strict=True)
        ]
        return table_text(["", self.base, self.other, *DIFFERENCE_COLUMNS, ""], rows)


DIFFERENCE_COLUMNS = ("difference", "95 % interval", "change")


def figures_of(one: FigureDifference) -> list[Cell]:
    """Return both values, and the columns of a difference."""
    interval = "-"
    if one.low is not None and one.high is not None:
        interval = f"{one.written(one.low, signed=True)} to {one.written(one.high, signed=True)}"
    return [
        Cell(one.written(one.base), one.base),
        Cell(one.written(one.other), one.other),
        Cell(one.written(one.difference, signed=True), one.difference),
        Cell(interval),
        Cell("-" if one.change is None else f"{one.change:+.1%}"),
    ]


class Unit(StrEnum):
    """Format of the values of an axis."""

    SECONDS = "seconds"
    SHARE = "share"
    COUNT = "count"
    NUMBER = "number"
    DOLLARS = "dollars"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotAxis:
    """An axis.

    Attributes:
        logarithmic: the initial choice; None for a linear axis without a choice.
    """

    label: str
    unit: Unit = Unit.NUMBER
    logarithmic: bool | None = False
    base: int = 10


class LineStyle(StrEnum):
    """Drawing style of a series."""

    LINE = "line"
    DASHED = "dashed"
    POINTS = "points"
    BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a plot.

    Attributes:
        values: one per place on the horizontal axis; None leaves a gap.
        colour: index of its colour, the same for the same thing in all plots.
    """

    name: str
    values: Sequence[float | None]
    style: LineStyle = LineStyle.LINE
    colour: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """An interactive plot, with its values as a table for browsers without scripts.

    Attributes:
        reading: how to read it, in a sentence or two.
        positions: positions of the values on the horizontal axis, ascending.
        marks: positions of vertical lines, with their names.
    """

    title: str
    reading: str
    x: PlotAxis
    y: PlotAxis
    positions: Sequence[float]
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()

    def __post_init__(self) -> None:
        for each in self.series:
            if len(each.values) != len(self.positions):
                raise ValueError(
                    f"series {each.name!r} of plot {self.title!r} has {len(each.values)} values for "
                    f"{len(self.positions)} positions: pass one per position, or None"
                )

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to draw."""
        return not any(
            value is not None and math.isfinite(value) for one in self.series for value in one.values
        )


Block = ReportTable | DifferenceTable | Plot


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A part of a report with a heading."""

    title: str
    blocks: Sequence[Block]
    intro: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a report.

    Attributes:
        provenance: as returned by `provenance.provenance`.
        command_line: the command that created it, without secrets.
    """

    provenance: Mapping[str, object]
    command_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReport:
    """A complete report.

    Attributes:
        facts: what was compared, with which workload and fleet, each with its name.
        verdict: the answer, in one sentence per candidate.
        notes: limitations and warnings.
    """

    title: str
    question: str
    facts: Sequence[tuple[str, str]]
    verdict: Sequence[str]
    sections: Sequence[ReportSection]
    origin: Origin
    notes: Sequence[str] = field(default_factory=tuple)
