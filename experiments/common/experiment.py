"""Experiment: typed settings, and a function that yields measurements."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from experiments.common.config import as_json
from experiments.common.provenance import TraceSource
from experiments.common.rows import Key
from serve_app.cli.command import progress_bar
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import parallel

S = TypeVar("S")
R = TypeVar("R")

PART = "part"
"""Name of a row's part in its key; see `experiment_of_parts`."""


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


def experiment_of_parts(parts: Mapping[str, Experiment[Any]], *, only_by_name: str = "") -> Experiment[Any]:
    """Return an experiment of several parts, each with settings in a field of its name.

    Its setting `play` has the names of the parts to measure. The keys of rows get the name as `part`.
    """
    fields = {"play": tuple[str, ...], **{name: part.settings for name, part in parts.items()}}
    made: type[Any] = settings(type("PartsSettings", (), {"__annotations__": fields}))
    return Experiment(settings=made, play=partial(_play_parts, parts), only_by_name=only_by_name)


def _play_parts(
    parts: Mapping[str, Experiment[Any]], settings: Any, context: Context
) -> Iterator[Measurement]:
    if unknown := set(settings.play) - parts.keys():
        raise SettingsError(f"no part {', '.join(sorted(unknown))}: there are {', '.join(parts)}")
    for name in settings.play:
        own = getattr(settings, name)
        kept = [
            {field: value for field, value in key.items() if field != PART}
            for key in context.kept
            if key.get(PART) == name
        ]
        for one in parts[name].play(own, Context(context.jobs, kept)):
            recorded = as_json(own) if one.settings is None else one.settings
            yield replace(one, key={PART: name, **one.key}, settings=recorded)
