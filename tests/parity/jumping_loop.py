"""Event loop with a virtual clock that jumps to the next timer: an hour passes in a moment."""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

from serve_app.lab.simulation.simulation import Action, Phase


class JumpingLoop(asyncio.SelectorEventLoop):
    """Event loop that never sleeps: when nothing is ready, its clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0

    def time(self) -> float:
        return self._virtual_now

    def _run_once(self) -> None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self._virtual_now = max(self._virtual_now, timers[0].when())
        # asyncio runs timers early by up to the clock's resolution; here only timers of this exact time may
        # run.
        self._clock_resolution = math.ulp(self._virtual_now)
        super()._run_once()  # type: ignore[misc]


class LoopTimeline:
    """The simulator's timeline on an event loop: simultaneous timers run in its defined order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._scheduled: list[tuple[float, int, int, Action]] = []
        self._sequence = itertools.count()

    @property
    def now(self) -> float:
        return self._loop.time()

    def schedule(self, time: float, phase: Phase, action: Action) -> None:
        heapq.heappush(self._scheduled, (time, phase, next(self._sequence), action))
        self._loop.call_at(time, self._run_first)

    def _run_first(self) -> None:
        heapq.heappop(self._scheduled)[3]()


def run_jumping(main: Callable[[], Any]) -> Any:
    """Run a coroutine function on a loop with a jumping clock."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main())
