"""Cleanup of all descendant processes.

Ray starts processes whose parents may exit before them. A process that declares itself a subreaper becomes
the parent of such orphans, so they remain in its process tree.
"""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Set

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def become_subreaper() -> None:
    """Become the parent of every orphaned descendant. Linux only; does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the ids of this process's children, orphans that it has adopted included."""
    return {child.pid for child in psutil.Process().children()}


def reap_orphans(own: Set[int]) -> None:
    """Reap children that have ended, except for those that this process has started itself.

    Their exit status belongs to the code that has started them. Without this, each dead process of Ray would
    leave the entries of its children in the kernel's process table.
    """
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, 0)


def descendants() -> list[psutil.Process]:
    """Return all running descendants of this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_descendants(timeout_s: float) -> list[int]:
    """Kill all descendants of this process.

    Args:
        timeout_s: time limit; the kernel needs a while to free many GB of memory.

    Returns:
        Ids of the processes that still run.
    """
    deadline = time.monotonic() + timeout_s
    while (family := descendants()) and time.monotonic() < deadline:
        # Loop, because a process may start children before it is killed.
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=_POLL_S)
    return [process.pid for process in descendants()]
