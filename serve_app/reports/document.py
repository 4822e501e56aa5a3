"""What a report is made of: facts, a verdict, and sections of tables and plots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app.metrics.confidence import ConfidenceInterval
from serve_app.reports.differences import FigureDifference


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure in a table.

    Attributes:
        text: as it is shown.
        value: unrounded, for programs that read the page.
    """

    text: str
    value: float | None = None


def interval_cell(interval: ConfidenceInterval | None, decimals: int, scale: float = 1.0) -> Cell:
    """A mean with half the width of its interval; a dash when there is none."""
    if interval is None:
        return Cell("-")
    return Cell(interval.as_text(decimals, scale), interval.mean)


def number_cell(value: float | None, decimals: int = 0, scale: float = 1.0) -> Cell:
    """A number; a dash when there is none."""
    return Cell("-") if value is None else Cell(f"{scale * value:,.{decimals}f}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table.

    Attributes:
        caption: says what its figures are.
        text_columns: the first columns, which hold text; the others hold figures.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    text_columns: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceTable:
    """The differences of one candidate from a baseline, each with a picture of its interval."""

    caption: str
    base: str
    other: str
    differences: Sequence[FigureDifference]


@dataclass(frozen=True, slots=True)
class Listing:
    """Text to copy, line by line."""

    caption: str
    text: str


class Unit(StrEnum):
    """How the values of an axis are written."""

    SECONDS = "seconds"
    SHARE = "share"
    COUNT = "count"
    NUMBER = "number"
    DOLLARS = "dollars"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotAxis:
    """An axis.

    Attributes:
        logarithmic: at first; None leaves the reader no choice, and is linear.
        base: of a logarithmic axis.
        from_zero: whether a linear axis without negative values begins at zero; not where only differences
            count.
    """

    label: str
    unit: Unit = Unit.NUMBER
    logarithmic: bool | None = False
    base: int = 10
    from_zero: bool = True


class Look(StrEnum):
    """How a series is drawn."""

    LINE = "line"
    STEP = "step"
    DASHED = "dashed"
    POINTS = "points"
    BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a plot.

    Attributes:
        values: one for each place on the horizontal axis; None leaves a gap.
        colour: number of its colour, the same for the same thing in all plots.
    """

    name: str
    values: Sequence[float | None]
    look: Look = Look.LINE
    colour: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """An interactive plot; without a script its values are there as a table.

    Attributes:
        reading: how to read it, in a sentence or two.
        places: of the values on the horizontal axis, ascending.
        marks: places of vertical lines, with their names.
    """

    title: str
    reading: str
    x: PlotAxis
    y: PlotAxis
    places: Sequence[float]
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()

    def __post_init__(self) -> None:
        for each in self.series:
            if len(each.values) != len(self.places):
                raise ValueError(
                    f"series {each.name!r} of plot {self.title!r} has {len(each.values)} values for "
                    f"{len(self.places)} places: give one for each, None where there is none"
                )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(
            value is not None and math.isfinite(value) for one in self.series for value in one.values
        )


Block = ReportTable | DifferenceTable | Listing | Plot


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A part of a report under a heading of its own."""

    title: str
    blocks: Sequence[Block]
    intro: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """How a report came about.

    Attributes:
        provenance: as `provenance.provenance` gives it.
        command_line: that made it, without secrets.
    """

    provenance: Mapping[str, object]
    command_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReport:
    """A whole report.

    Attributes:
        question: what was asked, in one sentence.
        facts: what was compared, on which workload, on which fleet; each with its name.
        verdict: the answer, in a sentence for each candidate.
        notes: what a reader has to know to trust it, warnings among them.
    """

    title: str
    question: str
    facts: Sequence[tuple[str, str]]
    verdict: Sequence[str]
    sections: Sequence[ReportSection]
    origin: Origin
    notes: Sequence[str] = field(default_factory=tuple)
