"""An experiment: typed settings, and a function that plays them and yields measurements."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from experiments.common.provenance import TraceSource
from experiments.common.rows import Key

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row as an experiment makes it; the framework adds commit, machine and time.

    Attributes:
        key: what tells this row from the others, such as `{"load": 0.9, "policy": "fcfs"}`.
        figures: what was measured, as JSON. A list over seeds is in the order of `seeds`.
        seeds: empty where nothing was drawn.
        traces: where the requests came from.
        settings: of this row alone, as JSON; None records all settings of the experiment.
    """

    key: Key
    figures: Mapping[str, Any]
    seeds: Sequence[int] = ()
    traces: Sequence[TraceSource] = ()
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What `play` is told besides its settings.

    Attributes:
        jobs: processes that may compute at the same time.
        kept: keys of rows that are there already, since an earlier play is resumed.
    """

    jobs: int
    kept: Sequence[Key] = ()

    def has(self, key: Key) -> bool:
        """Whether this row need not be measured; a row that is yielded all the same is dropped."""
        return key in self.kept


def _always() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Generic[S]):
    """What `experiments/NAME/run.py` defines as `EXPERIMENT`.

    Attributes:
        settings: a frozen dataclass; `config.yaml` holds its fields.
        play: measures, and yields a row as soon as it is known.
        unavailable: says why the experiment cannot be played on this machine; None when it can.
        only_by_name: why `--all` leaves it out all the same; empty when it does not.
    """

    FILE: ClassVar[str] = "run.py"

    settings: type[S]
    play: Callable[[S, Context], Iterator[Measurement]]
    unavailable: Callable[[], str | None] = _always
    only_by_name: str = ""
