"""Reaping of the children of processes that have died."""

import os
import subprocess
import sys

from serve_app.cli.serve.processes import children, reap_orphans


def ended_with(status: int) -> "subprocess.Popen[bytes]":
    """Return a child that has ended and was not waited for."""
    child = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child


def test_orphans_are_reaped() -> None:
    own = children()
    orphans = [ended_with(0), ended_with(1)]
    reap_orphans(own)
    assert not children() & {orphan.pid for orphan in orphans}
    for orphan in orphans:
        orphan.wait()


def test_the_status_of_own_children_is_left_to_their_owner() -> None:
    child = ended_with(3)
    reap_orphans(children())
    assert child.wait() == 3


def test_without_children_nothing_is_reaped() -> None:
    script = "from serve_app.cli.serve.processes import reap_orphans; reap_orphans(set())"
    subprocess.run([sys.executable, "-c", script], check=True)
