import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from serve_app.engines.orphan_guard import OrphanGuard

# A parent with a child process, like an engine; it prints the child's PID and waits to be killed.
PARENT = """
import asyncio, multiprocessing, time
from serve_app.engines.orphan_guard import OrphanGuard

def sleep():
    time.sleep(60)

async def main():
    guard = OrphanGuard()
    async with guard.guarding_new_children():
        child = multiprocessing.get_context("spawn").Process(target=sleep)
        child.start()
        await asyncio.sleep(1.0)
        print(child.pid, flush=True)
        await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def _gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_children_of_a_killed_process_are_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert psutil.pid_exists(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert _gone(child)


def test_a_released_guard_kills_no_process() -> None:
    guard = OrphanGuard()
    guard.start()
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        guard.protect(sleeper.pid)
        guard.release()
        time.sleep(0.3)
        assert sleeper.poll() is None
        assert not [child for child in psutil.Process().children() if "while read" in str(child.cmdline())]
    finally:
        sleeper.kill()
        sleeper.wait()


def _sleep() -> None:
    time.sleep(60)


async def test_a_child_that_was_there_before_is_left_alone() -> None:
    context = multiprocessing.get_context("spawn")
    before = context.Process(target=_sleep)
    before.start()
    guard = OrphanGuard()
    try:
        async with guard.guarding_new_children():
            new = context.Process(target=_sleep)
            new.start()
        assert guard.protected == {new.pid}
    finally:
        guard.release()
        for child in (before, new):
            child.kill()
            child.join()


def test_release_may_be_called_without_start_and_twice() -> None:
    here, guard = psutil.Process(), OrphanGuard()
    before = here.children()
    guard.release()
    guard.start()
    assert len(here.children()) == len(before) + 1
    guard.release()
    guard.release()
    assert here.children() == before


def test_protecting_before_the_start_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="before start"):
        OrphanGuard().protect(1)
