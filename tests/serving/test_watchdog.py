"""The watchdog kills a process that is halted, and no other."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

HALTED_S = 0.5
# Starts a watchdog, prints its PID, and does what the argument says.
PARENT = f"""
import sys, time
from serve_app.serving.watchdog import start_watchdog

watchdog = start_watchdog({HALTED_S})
print(watchdog.pid, flush=True)
while True:
    if sys.argv[1] == "idle":
        time.sleep(60)
"""
PTRACE_ATTACH, PTRACE_DETACH = 16, 17


@contextlib.contextmanager
def watched(does: str = "idle") -> Iterator[tuple["subprocess.Popen[str]", psutil.Process]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, does],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        try:
            yield parent, psutil.Process(int(parent.stdout.readline()))
        finally:
            parent.kill()


def test_a_halted_process_is_killed_and_its_watchdog_ends() -> None:
    with watched() as (parent, watchdog):
        # Workers of Ray lead a group, and its watchdog is not in it.
        os.killpg(parent.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert parent.wait(10) == -signal.SIGKILL
        assert HALTED_S * 0.7 < time.monotonic() - began < 5.0
        watchdog.wait(10)


def test_the_watchdog_ends_with_its_process() -> None:
    with watched() as (parent, watchdog):
        parent.terminate()
        watchdog.wait(10)


def test_a_process_without_cpu_time_is_not_killed() -> None:
    """Busy loops starve both, and the watched one has the lowest priority."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        with watched("compute") as (parent, watchdog):
            psutil.Process(parent.pid).nice(19)
            with pytest.raises(subprocess.TimeoutExpired):
                parent.wait(6 * HALTED_S)
            assert watchdog.is_running()
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_process_that_is_halted_again_and_again_is_not_killed() -> None:
    with watched() as (parent, _):
        for _ in range(10):
            parent.send_signal(signal.SIGSTOP)
            time.sleep(0.6 * HALTED_S)
            parent.send_signal(signal.SIGCONT)
        assert parent.poll() is None


def test_a_process_in_a_debugger_is_not_killed() -> None:
    with watched() as (parent, _):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(PTRACE_ATTACH, parent.pid, None, None) != 0:
            pytest.skip("this system forbids tracing")
        try:
            time.sleep(3 * HALTED_S)
            assert psutil.Process(parent.pid).status() == psutil.STATUS_TRACING_STOP
        finally:
            libc.ptrace(PTRACE_DETACH, parent.pid, None, None)
        assert parent.poll() is None


def test_halts_of_the_watchdog_itself_do_not_count() -> None:
    """A suspended machine suspends both."""
    with watched() as (parent, watchdog):
        watchdog.suspend()
        parent.send_signal(signal.SIGSTOP)
        time.sleep(3 * HALTED_S)
        parent.send_signal(signal.SIGCONT)
        watchdog.resume()
        time.sleep(2 * HALTED_S)
        assert parent.poll() is None
