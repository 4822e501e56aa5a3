"""Watchdog: a small child process that kills its parent if the parent is halted (SIGSTOP).

A halted process keeps its connections open, so its peers cannot distinguish it from a busy one. The kernel
can: only a halted process is in the state `T (stopped)`. A process that waits for a CPU, memory or a disk is
not, nor is one in a debugger (`t`), so a busy machine does not trip the watchdog. Time is counted in
observations, because a suspended machine or container suspends the watchdog, too.

Ray Serve replaces a killed process at once. A process that hangs in another way fails Serve's health checks.

The child runs this file as a script with the standard library only, to start quickly and use little memory.
"""

import os
import signal
import sys
import time

# As in `typing`, whose import would cost the child 1 MB.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

# Observations of a halted process until it is killed.
_OBSERVATIONS = 5
_STATUS_BYTES = 4096


def start_watchdog(halted_s: float = 4.0) -> "subprocess.Popen[bytes]":
    """Start a process that kills this one once it was halted for `halted_s` seconds; it ends with this one.

    Without Linux's `/proc`, it ends immediately.

    Args:
        halted_s: clients wait for this long, but a replacement of an engine takes minutes.

    Raises:
        OSError: the process cannot be started.
    """
    import subprocess  # noqa: PLC0415 - the child needs none of its memory

    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(halted_s)]
    # In a new session, because a signal to the group of this process must not reach its watchdog.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 - our own


def _watch(parent: int, halted_s: float) -> None:
    status = os.open(f"/proc/{parent}/status", os.O_RDONLY)
    switches, observations = b"", 0
    while observations < _OBSERVATIONS:
        time.sleep(halted_s / _OBSERVATIONS)
        if os.getppid() != parent:
            return
        state, _, now = os.pread(status, _STATUS_BYTES, 0).partition(b"\nvoluntary_ctxt_switches:")
        # A process that ran between two observations has switched contexts.
        has_run, switches = now != switches, now
        observations = 0 if b"\nState:\tT" not in state else 1 if has_run else observations + 1
    sys.stderr.write(f"event=halted_process_killed pid={parent}\n")
    os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    try:
        _watch(int(sys.argv[1]), float(sys.argv[2]))
    except (FileNotFoundError, ProcessLookupError):
        # The process has just ended, or this system has no `/proc`.
        sys.exit()
