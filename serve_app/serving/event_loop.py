"""Additions to the event loop: a precise clock, and long computations in parts."""

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeVar

import uvloop

Found = TypeVar("Found")


def precise_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the clock of a loop's timers, in seconds, with full precision also for uvloop.

    uvloop's own clock has whole milliseconds; its timers follow the system's monotonic clock, like this one.
    """
    return time.monotonic if isinstance(loop, uvloop.Loop) else loop.time


async def run_in_parts(look: Generator[None, None, Found]) -> Found:
    """Run a computation that yields between its parts, and return its result."""
    while True:
        try:
            next(look)
        except StopIteration as end:
            found: Found = end.value
            return found
        await asyncio.sleep(0)
