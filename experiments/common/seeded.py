"""Points of an experiment that are each simulated with some seeds, in processes of their own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from experiments.common.experiment import Context, Measurement
from experiments.common.provenance import generated
from experiments.common.rows import Key
from serve_app.command import progress_bar
from serve_app.simulation.batch import parallel

Run = TypeVar("Run")


def measured_points(
    title: str,
    points: Sequence[tuple[Key, Sequence[Run]]],
    figures: Callable[[Run], Mapping[str, Any]],
    context: Context,
    *,
    traffic: str,
) -> Iterator[Measurement]:
    """Every point that there is no row of yet.

    Args:
        title: of the progress bar.
        points: the key of each, and its runs with the seeds 0, 1, 2 and so on.
        figures: of one run; called in another process.
        traffic: what was generated.
    """
    with progress_bar(title, len(points)) as advance:
        for key, runs in points:
            if not context.has(key):
                of_seeds = list(parallel(figures, runs, context.jobs))
                yield Measurement(
                    key=key,
                    seeds=range(len(runs)),
                    traces=generated(traffic),
                    figures={name: [one[name] for one in of_seeds] for name in of_seeds[0]},
                )
            advance()
