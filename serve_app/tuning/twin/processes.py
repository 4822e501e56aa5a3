"""The digital twin in several processes, one twin in each.

Each process gets the plan once, when it starts, so a job is no more than some numbers. Results come in the
order of the jobs, whatever the number of processes, so a search takes the same course.
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType

from serve_app.tuning.objective.objective import Reward
from serve_app.tuning.search.study import Job
from serve_app.tuning.search.study_run import WindowResult
from serve_app.tuning.twin.digital_twin import DigitalTwin, TwinPlan

_twin: DigitalTwin | None = None
"""The twin of a worker process."""


class TwinProcesses:
    """A twin in each of `jobs` processes; with one job, in this process. To be closed, or used in `with`.

    Args:
        niceness: added to that of each process, so that it gives way to other work of the machine.
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
        """End the processes; unfinished jobs are lost."""
        if self._processes is not None:
            self._processes.shutdown(cancel_futures=True)

    def play(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, WindowResult]]:
        """Each job with its result, in the order of the jobs."""
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


def _play(job: Job) -> WindowResult:
    assert _twin is not None
    return _played(_twin, job)


def _played(twin: DigitalTwin, job: Job) -> WindowResult:
    """The result of a job; one that fails has no reward, which never counts as good, and the reason."""
    try:
        return twin.play(job.values, job.window)
    except Exception as error:  # noqa: BLE001 - one candidate must not end the search, whatever it breaks
        reason = f"{type(error).__name__}: {error}"
        return WindowResult(reward=Reward(value=None, reason=reason), requests=0)
