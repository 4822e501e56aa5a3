"""Leaves no process behind: whatever descends from this process can be found and ended.

Ray starts processes whose parents may end before them. A process that declares itself a subreaper
becomes the parent of such orphans, so they stay in its tree.
"""

import contextlib
import ctypes
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own; Linux only, elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """All processes below this one that still run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_descendants(timeout_s: float) -> list[int]:
    """End every process below this one.

    Args:
        timeout_s: how long they may take; the killed ones leave memory of many GB to the kernel.

    Returns:
        Those that still run.
    """
    deadline = time.monotonic() + timeout_s
    while (family := descendants()) and time.monotonic() < deadline:
        # Killed ones may leave children that were started meanwhile, hence the loop.
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=_POLL_S)
    return [process.pid for process in descendants()]
