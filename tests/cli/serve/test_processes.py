"""Processes of `serve`: their children, and their output."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from serve_app.cli.serve.processes import HostJob, Progress, children, reap_orphans
from serve_app.cli.serve.supervisor import Console, LaunchParameters
from serve_app.serving.access import RAY_TOKEN_VARIABLE


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


# -- output without a terminal: plain lines, each once ----------------------------------------------------

LAUNCH = LaunchParameters(
    job=HostJob(config="c", folder="/tmp/instance", url="http://127.0.0.1:8000"),
    environment={},
    drain_s=600.0,
    models=("demo", "alias"),
    requires_key=True,
    listen_address="http://0.0.0.0:8000",
)
DASHBOARD = "http://127.0.0.1:8265"


def test_each_deployment_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.step("engines")
    console.progress(Progress(["short"], ["long 0/1 starting"]))
    console.progress(Progress(["short", "long"], []))
    console.progress(Progress(["short", "long"], []))
    console.end_step()
    lines = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["short", "long", "engines"]


def test_the_ready_message_has_all_connection_details(capsys: pytest.CaptureFixture[str]) -> None:
    Console().ready(LAUNCH, DASHBOARD)
    output = capsys.readouterr().err
    assert "address    http://127.0.0.1:8000/v1   (listening on http://0.0.0.0:8000)" in output
    assert "models     demo, alias" in output
    assert "dashboard  http://127.0.0.1:8000/dashboard   (key: /tmp/instance/admin-key)" in output
    assert "-H 'authorization: Bearer YOUR_KEY'" in output
    assert '"model": "demo"' in output
    assert "logs       /tmp/instance/ray/session_latest/logs" in output
    assert "output     /tmp/instance/serve.log" in output
    assert "in-flight requests have 600 s to complete" in output
    assert "http://127.0.0.1:8265   (token: ray get-auth-token)" in output
    environment = {RAY_TOKEN_VARIABLE: "/tmp/instance/ray-token"}
    Console().ready(replace(LAUNCH, environment=environment), DASHBOARD)
    assert "http://127.0.0.1:8265   (token: /tmp/instance/ray-token)" in capsys.readouterr().err
    assert "\x1b" not in output


def test_a_pending_answer_is_reported_periodically(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("serve_app.cli.serve.supervisor.time.monotonic", lambda: now)
    console = Console()
    console.draining(3, 600.0)
    now += 6
    console.draining(1, 594.0)
    now += 1
    console.draining(1, 593.0)
    assert capsys.readouterr().err.splitlines() == [
        "stopping: 1 request in flight, 594 s left; Ctrl-C to stop immediately"
    ]


def test_an_unread_output_blocks_nothing() -> None:
    code = (
        "from serve_app.cli.serve.supervisor import Console\n"
        "from serve_app.cli.serve.processes import Progress\n"
        "console = Console()\n"
        "for _ in range(3):\n"
        "    console.line('nobody reads this')\n"
        "    console.step('engines')\n"
        "    console.progress(Progress(['short'], []))\n"
        "print('still here')\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    try:
        # The arguments are our own.
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writing, check=False
        )
    finally:
        os.close(writing)
    assert done.stdout == b"still here\n"
