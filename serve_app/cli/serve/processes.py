"""Processes of `serve`: cleanup of all descendants, and messages between host and supervisor.

Ray starts processes whose parents may exit before them. A process that declares itself a subreaper becomes
the parent of such orphans, so they remain in its process tree. Messages are JSON objects, one per line.
"""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Set

import msgspec
import psutil


class HostJob(msgspec.Struct, kw_only=True, frozen=True):
    """Start arguments of the host.

    Attributes:
        folder: folder for all files of this instance: Ray's files, logs.
        address: address of a running Ray cluster; None to start one on this machine.
        port: the application's port, instead of the configuration's.
        engines: kind of engine, such as `vllm`, by deployment of a pool.
    """

    config: str
    folder: str
    url: str
    address: str | None = None
    port: int | None = None
    dashboard: bool = False
    engines: dict[str, str] = {}


class StepBegun(msgspec.Struct, tag=True, frozen=True):
    """A step of the start has begun."""

    name: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Progress of the deployments.

    Attributes:
        lines: one per deployment that is not ready, such as `long 0/1 starting`.
        ready: names of the ready deployments.
    """

    ready: list[str]
    lines: list[str]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The application is ready for requests.

    Attributes:
        ray_address: address of its Ray cluster.
        dashboard: address of Ray's dashboard, if it runs.
        models_without_server: models of which discovery has found no server so far.
    """

    ray_address: str
    dashboard: str | None = None
    models_without_server: list[str] = []


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The start has failed, or the application cannot continue.

    Attributes:
        reason: one paragraph.
        is_transient: whether a second attempt may succeed.
    """

    reason: str
    is_transient: bool = False


class Draining(msgspec.Struct, tag=True, frozen=True):
    """Number of in-flight requests during a drain, and the time left."""

    open_requests: int
    remaining_s: float


class Drained(msgspec.Struct, tag=True, frozen=True):
    """The drain is complete. `aborted` requests ended with an error at the deadline."""

    aborted: int


HostMessage = StepBegun | Progress | Ready | Failed | Draining | Drained


class Stop(msgspec.Struct, frozen=True):
    """The supervisor's only command: reject new requests, complete in-flight ones, then exit.

    Attributes:
        drain_s: time limit for in-flight requests.
        retry_after_s: `Retry-After` of rejected requests.
    """

    drain_s: float
    retry_after_s: float


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
