"""Markdown tables of rows, with a caption that states the origin of the figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.common.provenance import Machine
from experiments.common.rows import Row, where
from serve_app.core.metrics.summary import interval_95
from serve_app.errors import SettingsError

_SHORT_COMMIT = 7
_SHORT_SUM = 8
_FILES_PER_SENTENCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of an experiment.

    Attributes:
        text: returns the Markdown, without a caption.
        where: selects the rows of the table by their key, see `rows.where`.
        note: start of the caption: a sentence on the meaning of the columns.
        shows_load: whether the load of the machine follows the table; relevant to live measurements.
    """

    text: Callable[[Sequence[Row]], str]
    where: Mapping[str, object] = field(default_factory=dict)
    note: str = ""
    shows_load: bool = False

    def written(self, rows: Sequence[Row]) -> str:
        """Return the table and its caption.

        Raises:
            SettingsError: it has no rows.
        """
        mine = where(rows, **self.where)
        if not mine:
            raise SettingsError(f"no row has {dict(self.where)}: play the experiment first")
        load = load_note(mine) if self.shows_load else ""
        return "\n\n".join(filter(None, (self.text(mine), load, f"*{caption(mine, self.note)}*")))


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of each row: its mean over seeds, and half the width of the interval.

    Attributes:
        scale: factor from the figure to the unit in the heading.
    """

    heading: str
    figure: str
    decimals: int = 2
    scale: float = 1.0

    def cell(self, row: Row) -> str:
        """Return the mean with its interval."""
        return plus_minus(row.figures[self.figure], self.decimals, scale=self.scale)

    def mean(self, row: Row) -> str:
        """Return the mean alone."""
        return self.cell(row).partition(" ±")[0]


@dataclass(frozen=True, slots=True)
class Computed:
    """A column with cells of any kind."""

    heading: str
    cell: Callable[[Row], str]


def line_per_row(
    by: Mapping[str, str | Callable[[Row], str]],
    columns: Sequence[Column | Computed],
    *,
    text_columns: int | None = None,
) -> Callable[[Sequence[Row]], str]:
    """Return a function that makes a table with a line for each row.

    Args:
        by: leading columns: a format of the row's key or a function, by heading.
        text_columns: by default all leading ones.
    """
    head = [*by, *(column.heading for column in columns)]

    def text(rows: Sequence[Row]) -> str:
        lines = [
            [
                *(one.format(**row.key) if isinstance(one, str) else one(row) for one in by.values()),
                *(column.cell(row) for column in columns),
            ]
            for row in rows
        ]
        return markdown(head, lines, text_columns=len(by) if text_columns is None else text_columns)

    return text


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], *, text_columns: int = 1) -> str:
    """Return a Markdown table: leading columns are text, the others figures, aligned right."""
    rule = ["---"] * text_columns + ["--:"] * (len(head) - text_columns)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def plus_minus(values: Sequence[float | None], decimals: int = 2, *, scale: float = 1.0) -> str:
    """Return the mean over seeds and half the width of its 95 % interval; `-` without values."""
    numbers = [value for value in values if value is not None]
    return interval_95(numbers).as_text(decimals, scale) if numbers else "-"


def load_note(rows: Sequence[Row]) -> str:
    """Return the load of the machine, including the experiment; relevant to live measurements."""
    loads = [row.machine.load_average[0] for row in rows if row.machine.load_average]
    if not loads:
        return ""
    low, high = f"{min(loads):.1f}", f"{max(loads):.1f}"
    span = low if low == high else f"{low} to {high}"
    return f"Load average of the machine during the experiment: {span}."


def caption(rows: Sequence[Row], note: str = "") -> str:
    """Return the origin of the figures: seeds, traces, commit, date, machine and experiment."""
    commits = ", ".join(sorted({_short(row.commit) for row in rows}))
    machines = "; ".join(sorted({_machine(row.machine) for row in rows}))
    measured = f"Measured {_dates(rows)} at commit {commits} on {machines}"
    parts = [note, _seeds(rows), *_traces(rows), f"{measured}, by `experiments/run {rows[0].experiment}`"]
    return " ".join(f"{part.rstrip('.')}." for part in parts if part)


def _seeds(rows: Sequence[Row]) -> str:
    counts = sorted({len(row.seeds) for row in rows if row.seeds})
    if not counts:
        return ""
    if counts == [1]:
        return "One seed"
    return f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"


def _traces(rows: Sequence[Row]) -> list[str]:
    sources = {source for row in rows for source in row.traces}
    made = sorted(source.name for source in sources if source.sha256 is None)
    files = sorted(
        f"{source.name} (SHA-256 {source.sha256[:_SHORT_SUM]})" for source in sources if source.sha256
    )
    return [
        *([f"Generated lengths: {', '.join(made)}"] if made else []),
        *(
            f"{'Also' if start else 'Trace files'}: {', '.join(files[start : start + _FILES_PER_SENTENCE])}"
            for start in range(0, len(files), _FILES_PER_SENTENCE)
        ),
    ]


def _dates(rows: Sequence[Row]) -> str:
    dates = sorted({row.measured_at[:10] for row in rows})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _short(commit: str | None) -> str:
    if commit is None:
        return "unknown"
    head, plus, changes = commit.partition("+")
    return f"{head[:_SHORT_COMMIT]}{plus}{changes}"


def _machine(machine: Machine) -> str:
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    return f"{machine.processor}, {cores}, {machine.memory_gib:.0f} GiB"
