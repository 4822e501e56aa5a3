"""Experiment: typed settings, and a function that yields measurements."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from experiments.common.provenance import TraceSource
from experiments.common.rows import Key

S = TypeVar("S")


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
