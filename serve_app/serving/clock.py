"""The clock that durations are measured on."""

import asyncio
import time
from collections.abc import Callable

import uvloop


def precise_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The clock of a loop's timers, in seconds, and precise also where the loop tells whole milliseconds.

    That is uvloop. Its timers and this clock both follow the system's monotonic one.
    """
    return time.monotonic if isinstance(loop, uvloop.Loop) else loop.time
