"""Windows in several processes: the twin of `digital_twin`, once in each.

Each process gets the plan once, when it starts, so that a job is no more than some numbers. Results come in
the order in which they were asked for, whatever the number of processes; so a search takes the same course.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType

from serve_app.tuning.objective.objective import Reward
from serve_app.tuning.search.scoreboard import Job
from serve_app.tuning.twin.digital_twin import DigitalTwin, Played, TwinPlan

_twin: DigitalTwin | None = None
"""The twin of a process that was started for it."""


class TwinProcesses:
    """A twin in each of `jobs` processes; with one job, in this process. To be closed, or used in `with`.

    Args:
        niceness: added to that of each process, so that it gives way to whatever else the machine does.
    """

    def __init__(self, plan: TwinPlan, *, jobs: int = 1, niceness: int = 0) -> None:
        if jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {jobs}")
        self._own = DigitalTwin(plan) if jobs == 1 else None
        self._processes = None
        if jobs > 1:
            # A fresh interpreter each: a fork of one that draws a progress bar may hang on the bar's lock.
            context = multiprocessing.get_context("spawn")
            self._processes = ProcessPoolExecutor(
                jobs, mp_context=context, initializer=_begin, initargs=(plan, niceness)
            )

    def __enter__(self) -> "TwinProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; what they were at is lost."""
        if self._processes is not None:
            self._processes.shutdown(cancel_futures=True)

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Played]]:
        """Each job with what came of it, in their order."""
        if self._own is not None:
            for job in jobs:
                yield job, _played(self._own, job)
            return
        assert self._processes is not None
        yield from zip(jobs, self._processes.map(_play, jobs), strict=True)


def _begin(plan: TwinPlan, niceness: int) -> None:
    global _twin  # noqa: PLW0603 - a process of the pool has nothing else to keep it in
    os.nice(niceness)
    _twin = DigitalTwin(plan)


def _play(job: Job) -> Played:
    assert _twin is not None
    return _played(_twin, job)


def _played(twin: DigitalTwin, job: Job) -> Played:
    """What came of a job; one that fails has no reward, which never counts as good, and says why."""
    try:
        return twin.play(job.values, job.window)
    except Exception as error:  # noqa: BLE001 - one candidate must not end the search, whatever it breaks
        return Played(reward=Reward(value=None, reason=f"{type(error).__name__}: {error}"), requests=0)
