"""Start and stop as users see them: terminal output, client answers, and leftovers."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from pathlib import Path

import aiohttp
import httpx
import psutil
import pytest

from experiments.common.application import free_port
from serve_app.cli.serve.instance import instance_folder, running_instances
from tests.cli.serve.application import Terminal, configuration, listening, on_terminal, terminal

pytestmark = pytest.mark.timeout(400)

# Long enough to be cut: 1,800 tokens take more than seven seconds.
LONG = {
    "model": "demo",
    "stream": True,
    "max_tokens": 1800,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": "Hello"}],
}
END_S = 60.0
# Time, 30 s by default, that Ray waits for the port of its control service; one that was killed writes none.
WAIT_VARIABLE = "RAY_gcs_server_port_wait_time_s"


async def stream(session: aiohttp.ClientSession, url: str) -> str:
    """Return the end of one stream."""
    try:
        async with session.post(f"{url}/v1/chat/completions", json=LONG) as answer:
            text = await answer.text()
    except aiohttp.ClientError as exc:
        return f"cut: {exc!r}"
    if answer.status != 200:
        assert int(answer.headers["retry-after"]) >= 1
        return f"rejected with {answer.status}"
    if text.endswith("data: [DONE]\n\n"):
        return "complete"
    return "error event" if '"code":"shutting_down"' in text.splitlines()[-2] else f"cut: {text[-200:]}"


async def _ends(url: str, streams: int, stop: "asyncio.Future[None]") -> Counter[str]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=200)
    ) as session:
        reading = [asyncio.create_task(stream(session, url)) for _ in range(streams)]
        await asyncio.sleep(2.0)
        stop.set_result(None)
        return Counter(await asyncio.gather(*reading))


async def ends_of_streams(url: str, streams: int, opened: Terminal, how: str) -> Counter[str]:
    """Open streams, stop the application in one way, and count the ends of the streams."""
    stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ending = asyncio.create_task(_ends(url, streams, stop))
    await stop
    if how == "Ctrl-C":
        opened.type_interrupt()
    elif how == "closed":
        opened.close()
    else:
        os.kill(opened.process.pid, signal.SIGTERM)
    return await ending


def statuses_of_ready(url: str, opened: Terminal) -> set[int]:
    """Poll `/ready` until the application has ended; return its statuses."""
    found: set[int] = set()
    while opened.process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            found.add(httpx.get(f"{url}/ready", timeout=1).status_code)
        opened.read()
        time.sleep(0.1)
    return found


@pytest.mark.slow
async def test_a_closed_terminal_drains_answers_and_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with terminal(configuration(tmp_path, port, drain_s=3.0)) as opened:
        await asyncio.to_thread(opened.wait_for, "stop ")
        shown = opened.output
        words = " ".join(shown.split())
        assert f"address {url}/v1" in words
        assert "models demo, gpt-4o-mini" in words
        assert f"curl {url}/v1/chat/completions" in shown
        for deployment in ("short-demo", "long-demo", "scheduler-demo", "gateway"):
            assert f"{deployment} ready" in shown
        assert "Traceback" not in shown
        assert url in [instance.url for instance in running_instances()]
        ends = await ends_of_streams(url, 24, opened, "closed")
        assert sum(ends.values()) == 24
        assert set(ends) <= {"complete", "error event", "rejected with 503"}, ends
        assert opened.ended(END_S) == 0
        assert opened.processes_left() == []
        assert listening((port,)) == []
        assert url not in [instance.url for instance in running_instances()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "drain_s"),
    [("Ctrl-C", 4.0), ("SIGTERM", 4.0), ("closed", 4.0), ("Ctrl-C", 120.0), ("SIGTERM", 120.0)],
)
async def test_no_stop_cuts_a_stream_without_an_error_event(tmp_path: Path, how: str, drain_s: float) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with terminal(configuration(tmp_path, port, drain_s=drain_s)) as opened:
        await asyncio.to_thread(opened.wait_for, "stop ")
        ends = await ends_of_streams(url, 50, opened, how)
        if drain_s > 100:
            assert ends == {"complete": 50}
        else:
            assert set(ends) <= {"complete", "error event", "rejected with 503"}, ends
        assert opened.ended(END_S) == 0
        assert opened.processes_left() == []
        assert listening((port,)) == []


@pytest.mark.slow
async def test_a_second_interrupt_stops_immediately(tmp_path: Path) -> None:
    port = free_port()
    with terminal(configuration(tmp_path, port, drain_s=600.0)) as opened:
        await asyncio.to_thread(opened.wait_for, "stop ")
        ending = asyncio.create_task(ends_of_streams(f"http://127.0.0.1:{port}", 2, opened, "Ctrl-C"))
        await asyncio.to_thread(opened.wait_for, "Stopping")
        opened.type_interrupt()
        assert await asyncio.to_thread(opened.ended, END_S) == 0
        await ending
        assert "in-flight requests were aborted" in opened.output
        assert opened.processes_left() == []
        assert listening((port,)) == []


@pytest.mark.slow
def test_a_supervisor_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    with terminal(configuration(tmp_path, port, drain_s=600.0)) as opened:
        opened.wait_for("stop ")
        opened.process.kill()
        deadline = time.monotonic() + END_S
        while opened.processes_left() or listening((port,)):
            assert time.monotonic() < deadline, opened.processes_left()
            time.sleep(0.2)


@pytest.mark.slow
def test_two_instances_of_a_configuration_serve_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A home in which nothing can be written, as in many containers.
    monkeypatch.setenv("HOME", os.devnull)
    ports = [free_port(), free_port()]
    config = configuration(tmp_path, ports[0], drain_s=5.0)
    with contextlib.ExitStack() as stack:
        for options in ((), ("--port", str(ports[1]))):
            opened = stack.enter_context(on_terminal("serve", str(config), *options))
            opened.wait_for("stop ")
        for port in ports:
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/completions",
                json={"model": "demo", "prompt": "Hi", "max_tokens": 2},
                timeout=30,
            )
            assert answer.status_code == 200
            assert httpx.get(f"http://127.0.0.1:{port}/metrics").text.count("ewsjf_gateways_connected{") == 1


@pytest.mark.slow
def test_an_engine_that_cannot_start_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    server = {"endpoints": ["http://127.0.0.1:9"], "advanced": {"start_timeout_s": 3.0}}
    pool = {"name": "only", "engine": {"remote": server}, "resources": {"num_cpus": 0.1}}
    port = free_port()
    with terminal(configuration(tmp_path, port, drain_s=5.0, pools=[pool])) as opened:
        statuses = statuses_of_ready(f"http://127.0.0.1:{port}", opened)
        assert opened.ended(10) == 1
    # The gateway runs and reports that no engine does.
    assert 503 in statuses
    assert 200 not in statuses
    output = " ".join(opened.output.split())
    assert (
        "only-demo did not start: no endpoint can be used: http://127.0.0.1:9/v1/models gave no answer"
        in output
    )
    assert "Traceback" not in output
    assert opened.processes_left() == []
    assert listening((port,)) == []


@pytest.mark.application
def test_a_start_that_is_interrupted_leaves_its_logs_until_the_one_after_the_next(tmp_path: Path) -> None:
    port = free_port()
    config, folder = configuration(tmp_path, port, drain_s=5.0), instance_folder(port)
    interrupt_a_start(config)
    (folder / "serve.log").write_text("first", encoding="utf-8")
    assert f"logs of the previous run: {folder}.last" in interrupt_a_start(config)
    assert (Path(f"{folder}.last") / "serve.log").read_text(encoding="utf-8") == "first"
    assert (folder / "serve.log").read_text(encoding="utf-8") != "first"


@pytest.mark.application
def test_ray_is_started_again_if_one_of_its_processes_dies_in_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second start, which must succeed, may be slow on a busy machine.
    monkeypatch.setenv(WAIT_VARIABLE, "10")
    port = free_port()
    with terminal(configuration(tmp_path, port, drain_s=1.0)) as opened:
        kill_ray(opened)
        opened.wait_for("Starting Ray once more.")
        opened.wait_for("Ready after")
        assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        opened.wait_for("Ctrl-C: in-flight requests")
        opened.type_interrupt()
        assert opened.ended(END_S) == 0
        assert opened.processes_left() == []


@pytest.mark.application
def test_a_second_failure_of_ray_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WAIT_VARIABLE, "2")
    with terminal(configuration(tmp_path, free_port(), drain_s=1.0)) as opened:
        kill_ray(opened)
        opened.wait_for("Starting Ray once more.")
        kill_ray(opened)
        assert opened.ended(END_S) == 1
        assert opened.output.count("Ray did not start: ") == 2
        assert opened.processes_left() == []


def kill_ray(opened: Terminal) -> None:
    """Wait until Ray starts, and kill its control service at once."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        for process in psutil.Process(opened.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.name() == "gcs_server":
                    process.kill()
                    return
        opened.read()
        time.sleep(0.005)
    raise AssertionError(opened.output)


def interrupt_a_start(config: Path) -> str:
    """Press Ctrl-C before the application is ready; return the output."""
    with terminal(config) as opened:
        opened.wait_for("is valid")
        time.sleep(2.0)
        opened.wait_for("is valid")  # again, for the current processes
        opened.type_interrupt()
        assert opened.ended(END_S) == 130
        assert "Stopped before it was ready" in opened.output
        assert opened.processes_left() == []
        return opened.output
