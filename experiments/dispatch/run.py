"""What does the scheduler itself cost per request, and does a larger fleet make it dearer?

Drives the pure scheduler, with production settings, through the events of each request: it arrives, is
dispatched, sends its first token, finishes. In between every replica reports, five times a second of the
fleet's time. Half of the replicas are a short pool, half a long one, each with half of the work. Requests are
conversations that come at the rate that takes a share of all places. Each fleet is played until it is full,
and then in windows, all fleets and deciders by turns.

Python's cyclic garbage collector rests during the windows, and collects between them, unless `collector` is
set.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Annotated, Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.dispatch.deciders import DECIDERS
from experiments.dispatch.drive import KINDS, Drive, Window
from experiments.dispatch.traffic import traffic
from serve_app.command import progress_bar
from serve_app.metrics.statistics import Distribution
from serve_app.settings_base import POSITIVE, settings

# A fleet is full after some times the mean service time; few replicas take longer to fill their caches.
_FILL_TURNS = 2.5
_LEAST_FILL_REQUESTS = 4_000


@settings
class DispatchSettings:
    """What is played.

    Attributes:
        replicas: sizes of fleets.
        deciders: see `deciders.DECIDERS`.
        places: sequences of each replica.
        taken: share of places taken.
        requests: in each window.
        windows: how many, all deciders by turns.
        seed: of the conversations.
        collector: let Python's garbage collector work during the windows.
    """

    replicas: tuple[int, ...]
    deciders: tuple[str, ...] = tuple(DECIDERS)
    places: Annotated[int, POSITIVE] = 16
    taken: Annotated[float, POSITIVE] = 0.8
    requests: Annotated[int, POSITIVE] = 1_000
    windows: Annotated[int, POSITIVE] = 10
    report_interval_s: Annotated[float, POSITIVE] = 0.2
    seed: int = 0
    collector: bool = False

    def __post_init__(self) -> None:
        for name in self.deciders:
            if name not in DECIDERS:
                raise ValueError(f"no decider {name!r}: there are {', '.join(DECIDERS)}")


@dataclass(slots=True)
class Cell:
    """One decider with one fleet: how far it has come, and its windows."""

    decider: str
    replicas: int
    drive: Drive
    windows: list[Window] = field(default_factory=list)


def play(settings: DispatchSettings, _context: Context) -> Iterator[Measurement]:
    """All cells by turns, in this process: what runs beside them would change their caches."""
    cells = _filled(settings)
    with progress_bar("windows", settings.windows * len(cells)) as advance:
        _play_windows(settings, cells, advance)
    for cell in cells:
        yield Measurement(
            key={"decider": cell.decider, "replicas": cell.replicas},
            seeds=(settings.seed,),
            traces=generated("conversations"),
            figures=_figures(cell, cells),
        )


def _filled(settings: DispatchSettings) -> list[Cell]:
    """All fleets, as full as they will be."""
    sizes = sorted(set(settings.replicas))
    cells: list[Cell] = []
    with progress_bar("fleets filled", len(sizes) * len(settings.deciders)) as advance:
        for replicas in sizes:
            fill = max(_LEAST_FILL_REQUESTS, round(_FILL_TURNS * settings.taken * settings.places * replicas))
            fleet = traffic(
                replicas,
                settings.places,
                settings.taken,
                fill + settings.windows * settings.requests + 1,
                report_interval_s=settings.report_interval_s,
                seed=settings.seed,
            )
            for name in settings.deciders:
                cell = Cell(name, replicas, Drive(DECIDERS[name](fleet), fleet))
                cell.drive.play(fill)
                cells.append(cell)
                advance()
    return sorted(cells, key=lambda cell: settings.deciders.index(cell.decider))


def _play_windows(settings: DispatchSettings, cells: list[Cell], advance: Callable[[], object]) -> None:
    """One window of each, then the next of each."""
    gc.collect()
    if not settings.collector:
        # What exists by now is never looked at again, so that collecting between windows is quick.
        gc.freeze()
        gc.disable()
    try:
        for _window in range(settings.windows):
            for cell in cells:
                if not settings.collector:
                    gc.collect()
                cell.windows.append(cell.drive.play(settings.requests))
                advance()
    finally:
        gc.enable()
        gc.unfreeze()


def _figures(cell: Cell, cells: list[Cell]) -> dict[str, Any]:
    """Lists have one value for each window; the first cell of a decider has its smallest fleet."""
    smallest = next(one for one in cells if one.decider == cell.decider)
    requests_us = [window.per_request_us() for window in cell.windows]
    return {
        "events_us": {
            kind: Distribution.of(
                cost / 1_000 for cost in chain(*(window.costs_ns[kind] for window in cell.windows))
            ).as_json()
            for kind in KINDS
        },
        "request_us": requests_us,
        "of_smallest": [
            mine / window.per_request_us() for mine, window in zip(requests_us, smallest.windows, strict=True)
        ],
        "submitted": sum(window.submitted for window in cell.windows),
        "dispatched": sum(window.dispatched for window in cell.windows),
        "taken": fmean(window.taken for window in cell.windows),
        "busy": min(window.busy for window in cell.windows),
    }


EXPERIMENT = Experiment(settings=DispatchSettings, play=play)
