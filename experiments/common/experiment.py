"""Experiment: typed settings, and a function that yields measurements."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from experiments.common.provenance import TraceSource
from experiments.common.rows import Key
from serve_app.cli.command import progress_bar
from serve_app.lab.simulation.run import parallel

S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row as an experiment produces it; the framework adds commit, machine and time.

    Attributes:
        key: identifies the row in the experiment, such as `{"load": 0.9, "policy": "fcfs"}`.
        figures: results, as JSON. A list over seeds is in the order of `seeds`.
        seeds: empty where nothing was drawn.
        traces: origin of the requests.
        settings: of this row alone, as JSON; None records all settings of the experiment.
    """

    key: Key
    figures: Mapping[str, Any]
    seeds: Sequence[int] = ()
    traces: Sequence[TraceSource] = ()
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """Arguments of `play` besides its settings.

    Attributes:
        jobs: number of processes that may compute in parallel.
        kept: keys of rows that an earlier, now resumed run measured.
    """

    jobs: int
    kept: Sequence[Key] = ()

    def has(self, key: Key) -> bool:
        """Return whether this row exists already; if it is yielded again, it is dropped."""
        return key in self.kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Generic[R]):
    """A row to measure, with one run for each seed; see `Measurement` for the other fields."""

    key: Key
    runs: Sequence[R]
    seeds: Sequence[int]
    traces: Sequence[TraceSource]
    settings: Mapping[str, Any] | None = None


def play_cells(
    title: str, cells: Sequence[Cell[R]], play: Callable[[R], Mapping[str, Any]], context: Context
) -> Iterator[Measurement]:
    """Measure the cells without a row one after another, the runs of each in parallel.

    Args:
        play: returns the figures of a run.
    """
    with progress_bar(title, len(cells)) as advance:
        for cell in cells:
            if not context.has(cell.key):
                yield Measurement(
                    key=cell.key,
                    figures=over_seeds(list(parallel(play, cell.runs, context.jobs))),
                    seeds=cell.seeds,
                    traces=cell.traces,
                    settings=cell.settings,
                )
            advance()


def over_seeds(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return each figure as a list with its value in each run."""
    return {name: [one[name] for one in runs] for name in runs[0]}


def _always() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Generic[S]):
    """Type of `EXPERIMENT` in `experiments/NAME/run.py`.

    Attributes:
        settings: a frozen dataclass; `config.yaml` has its fields.
        play: measures, and yields each row as soon as it is complete.
        unavailable: returns why the experiment cannot run on this machine, or None if it can.
        only_by_name: why `--all` still leaves it out; empty if it does not.
    """

    FILE: ClassVar[str] = "run.py"

    settings: type[S]
    play: Callable[[S, Context], Iterator[Measurement]]
    unavailable: Callable[[], str | None] = _always
    only_by_name: str = ""
