"""What does it cost a gateway to read a request, from the body's first piece to the job of forwarding it?

A gateway's own reader is handed bodies of several kinds and sizes, in the pieces in which its HTTP server
hands them on. Keys are asked for and prefixes hashed. No process is started: what is measured is the CPU time
of this one, threads for large bodies included.
"""

import asyncio
import statistics
from collections.abc import Iterator, Mapping

import uvloop

from experiments.bodies.reading import Reading
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.common.rows import Key
from serve_app.command import progress_bar
from serve_app.settings_base import settings


@settings
class BodiesSettings:
    """What is read.

    Attributes:
        sizes: of the bodies of each kind, in bytes, about; the kinds are those of `kinds`.
        rounds: of each measurement; a row has their median and the fastest.
    """

    sizes: Mapping[str, tuple[int, ...]]
    rounds: int


def play(settings: BodiesSettings, context: Context) -> Iterator[Measurement]:
    """Every kind in every size."""
    keys: list[tuple[str, int]] = [(kind, size) for kind, sizes in settings.sizes.items() for size in sizes]
    with progress_bar("bodies", len(keys)) as advance:
        for kind, size in keys:
            key: Key = {"body": kind, "bytes": size}
            if not context.has(key):
                yield _measured(key, Reading(kind, size), settings.rounds)
            advance()


def _measured(key: Key, reading: Reading, rounds: int) -> Measurement:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        costs = runner.run(reading.costs_us(rounds))
    figures = {
        f"{name}_{which}_us": round(of(values), 2)
        for name, values in costs.items()
        for which, of in (("median", statistics.median), ("least", min))
    }
    return Measurement(
        key=key,
        figures={**figures, "body_bytes": len(reading.body)},
        traces=generated("bodies of drawn words"),
    )


EXPERIMENT = Experiment(settings=BodiesSettings, play=play)
