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
    """

    text: Callable[[Sequence[Row]], str]
    where: Mapping[str, object] = field(default_factory=dict)
    note: str = ""

    def written(self, rows: Sequence[Row]) -> str:
        """Return the table and its caption.

        Raises:
            SettingsError: it has no rows.
        """
        mine = where(rows, **self.where)
        if not mine:
            raise SettingsError(f"no row has {dict(self.where)}: play the experiment first")
        return f"{self.text(mine)}\n\n*{caption(mine, self.note)}*"


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
        *(
            f"{'Also' if start else 'Trace files'}: {', '.join(files[start : start + _FILES_PER_SENTENCE])}"
            for start in range(0, len(files), _FILES_PER_SENTENCE)
        ),
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
