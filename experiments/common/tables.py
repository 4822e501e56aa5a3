"""Tables in Markdown, made from rows, with a caption that says where the figures come from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.common.provenance import Machine
from experiments.common.rows import Row, where
from serve_app.core.metrics.confidence import interval_95
from serve_app.errors import SettingsError

_SHORT_COMMIT = 7
_SHORT_SUM = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of an experiment.

    Attributes:
        text: makes the Markdown, without a caption.
        where: what a row's key must have to be in the table, see `rows.where`.
        note: begins the caption: what the columns mean, in a sentence.
    """

    text: Callable[[Sequence[Row]], str]
    where: Mapping[str, object] = field(default_factory=dict)
    note: str = ""

    def written(self, rows: Sequence[Row]) -> str:
        """The table and its caption.

        Raises:
            SettingsError: no row belongs to it.
        """
        mine = where(rows, **self.where)
        if not mine:
            raise SettingsError(f"no row has {dict(self.where)}: play the experiment first")
        return f"{self.text(mine)}\n\n*{caption(mine, self.note)}*"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], *, text_columns: int = 1) -> str:
    """A table whose first columns are text, and whose others are figures, to the right."""
    rule = ["---"] * text_columns + ["--:"] * (len(head) - text_columns)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def plus_minus(values: Sequence[float | None], decimals: int = 2, *, scale: float = 1.0) -> str:
    """The mean over seeds and half the width of its 95 % interval; `-` when there are no values."""
    numbers = [value for value in values if value is not None]
    return interval_95(numbers).as_text(decimals, scale) if numbers else "-"


def load_note(rows: Sequence[Row]) -> str:
    """How busy the machine was, our own work included: it matters where time is real."""
    loads = [row.machine.load_average[0] for row in rows if row.machine.load_average]
    if not loads:
        return ""
    low, high = f"{min(loads):.1f}", f"{max(loads):.1f}"
    span = low if low == high else f"{low} to {high}"
    return f"The machine's load average was {span} with this experiment at work."


def caption(rows: Sequence[Row], note: str = "") -> str:
    """Where the figures come from: seeds, traces, commit, date, machine, and the experiment."""
    measured = f"Measured {_dates(rows)} at commit {_commits(rows)} on {_machines(rows)}"
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
        *([f"Trace files: {', '.join(files)}"] if files else []),
    ]


def _dates(rows: Sequence[Row]) -> str:
    dates = sorted({row.measured_at[:10] for row in rows})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _commits(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({_short(row.commit) for row in rows}))


def _short(commit: str | None) -> str:
    if commit is None:
        return "unknown"
    head, plus, changes = commit.partition("+")
    return f"{head[:_SHORT_COMMIT]}{plus}{changes}"


def _machines(rows: Sequence[Row]) -> str:
    return "; ".join(sorted({_machine(row.machine) for row in rows}))


def _machine(machine: Machine) -> str:
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    return f"{machine.processor}, {cores}, {machine.memory_gib:.0f} GiB"
