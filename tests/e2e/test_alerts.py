"""Every alert fired by its fault, in a running application scraped by a real Prometheus.

Times are shortened: no `for`, windows of seconds, and two thresholds that would take minutes to reach.
SchedulerFault, ScalingFails and MixedVersions are not here: they need a fault of this project or half an
upgrade. tests/observability/test_rules.py tests all alerts on series.
"""

import asyncio
import contextlib
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve_app.engines.engine import Receive, Scope, Send
from tests.e2e.served import Served, serve, wait_for
from tests.engines.servers import free_port
from tests.http_server import listening
from tests.observability.prometheus import Prometheus, prometheus, rules
from tests.serving.gateway.builders import MODEL, reply_json
from tests.serving.remote.servers import VllmLike

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BY_SERIES_ALONE = {"SchedulerFault", "ScalingFails", "MixedVersions"}
PATIENCE_S = 90.0


class FaultyEndpoint(VllmLike):
    """Server whose engine fails on demand."""

    fails = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.fails and scope["method"] == "POST":
            await reply_json(send, 500, {"error": {"message": "CUDA error", "code": 500}})
        else:
            await super().__call__(scope, receive, send)


class BackgroundServer:
    """Endpoint in its own thread that can be stopped."""

    def __init__(self, engine: FaultyEndpoint) -> None:
        self.engine, self.port = engine, free_port()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()

    async def _serve(self) -> None:
        async with listening(self.engine, self.port):
            await self._stop.wait()

    def stop(self) -> None:
        """Stop listening."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(20)


@contextlib.contextmanager
def load(url: str, clients: int, headers: dict[str, str] | None = None, **body: Any) -> Iterator[None]:
    """Run this many clients until the block ends, each with one request after another."""
    stop = threading.Event()

    async def client(http: httpx.AsyncClient, number: int) -> None:
        chat = {"model": "demo", "max_tokens": 200, "stream": True, "user": f"tenant{number % 3}", **body}
        chat["messages"] = [{"role": "user", "content": f"{number} " + "word " * 30}]
        while not stop.is_set():
            with contextlib.suppress(httpx.HTTPError):
                async with http.stream("POST", "/v1/chat/completions", json=chat, headers=headers) as answer:
                    await answer.aread()
                # Rejected clients retry soon, but not as fast as the machine can.
                if answer.status_code != 200:
                    await asyncio.sleep(0.2)

    async def run() -> None:
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            await asyncio.gather(*(client(http, number) for number in range(clients)))

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def with_short_times(text: str) -> str:
    """Return the rules with short times."""
    text = re.sub(r"\n +for: \w+", "", text)
    text = re.sub(r"\[(5m|10m|1h)\]", "[15s]", text)
    assert "> 900" in text
    assert "> 30\n" in text
    return text.replace("> 900", "> 10").replace("> 30\n", "> 3\n")


@dataclass
class Watched:
    """The application, its Prometheus, and the alerts that have fired."""

    app: Served
    watcher: Prometheus
    fired: set[str]

    def expect(self, name: str) -> None:
        """Wait until the alert fires."""
        wait_for(lambda: name in self.watcher.firing(), PATIENCE_S, f"alert {name}")
        self.fired.add(name)

    def expect_resolved(self, *names: str) -> None:
        """Wait until none of these alerts fires."""
        wait_for(lambda: not self.watcher.firing() & set(names), PATIENCE_S, self.watcher.firing)

    def process(self, deployment: str) -> psutil.Process:
        """Return a replica's process."""
        wait_for(lambda: self.app.replicas(deployment), 60)
        return self.app.replicas(deployment)[0]


def args(endpoint: str, state: Path) -> dict[str, Any]:
    """Return a small model that is easily overloaded, and a model on an external server."""
    engine = {"profile": "laptop", "max_model_len": 2048, "max_num_seqs": 4, "advanced": {"kv_tokens": 2048}}
    targets = {"ttft_s": 0.3, "advanced": {"long_ttft_s": 0.3}}
    return {
        "models": [
            {
                "name": "demo",
                "pools": [{"name": "only", "engine": {"emulated": engine}, "resources": {"num_cpus": 0.1}}],
                "scheduler": {"max_waiting": 40},
                # A profile of other engines: the twin is wrong until it has been fitted.
                "tuner": {
                    "mode": True,
                    "profile": "llama2-70b-h100-tp4",
                    "targets": dict.fromkeys(("interactive", "default"), targets),
                },
            },
            {
                "name": MODEL,
                "pools": [{"name": "outside", "engine": {"remote": {"endpoints": [endpoint]}}}],
                "scheduler": {"advanced": {"no_replica_grace_s": 1.0}},
                "tuner": {"mode": False},
            },
        ],
        "gateways": {"replicas": 1, "num_cpus": 0.1},
        "state_uri": str(state),
        "advanced": {"state_interval_s": 2.0},
    }


@pytest.fixture
def faulty_endpoint() -> Iterator[BackgroundServer]:
    found = BackgroundServer(FaultyEndpoint())
    yield found
    found.stop()


def test_every_alert_is_fired_by_its_fault(faulty_endpoint: BackgroundServer, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (tmp_path / "prometheus").mkdir()
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(contextlib.ExitStack())
        app = running.enter_context(serve(args(f"http://127.0.0.1:{faulty_endpoint.port}", state)))
        app.wait_until_ready()
        watcher = stack.enter_context(prometheus(app.url, tmp_path / "prometheus", with_short_times))
        watched = Watched(app, watcher, set())
        wait_for(lambda: watcher.targets().get("ewsjf", 0) == 1, 30, watcher.targets)
        in_order(watched)
        too_many_requests(watched)
        failing_engines(watched, faulty_endpoint)
        silent_and_dying_replicas(watched)
        slow_and_dying_schedulers(watched)
        lost_state(watched, state)
        running.close()
        watched.expect("NoMetrics")
        assert watched.fired == {rule["alert"] for rule in rules()} - BY_SERIES_ALONE


def in_order(watched: Watched) -> None:
    """Check that light traffic fires nothing except the alert for the wrong profile."""
    with load(watched.app.url, 1, max_tokens=4), load(watched.app.url, 1, model=MODEL, max_tokens=4):
        time.sleep(10)
        assert watched.watcher.firing() <= {"TwinError"}
        watched.expect("TwinError")


def too_many_requests(watched: Watched) -> None:
    """Overload one small engine: it rejects, queues, and lets requests expire.

    It preempts as well, because its answers are longer than those expected before any has been observed.
    """
    url = watched.app.url
    with load(url, 60, max_tokens=800, ignore_eos=True):
        for name in ("OverCapacity", "PoolSaturated", "RequestsWaitLong", "TargetsMissed", "Preemptions"):
            watched.expect(name)
    # Fewer than the queue holds: with a full queue, all would be rejected before they can expire.
    with (
        load(url, 30, max_tokens=800, ignore_eos=True),
        load(url, 4, {"x-queue-timeout-s": "0.4", "x-priority": "batch"}),
    ):
        watched.expect("DeadlinesMissed")
    watched.expect_resolved("OverCapacity", "PoolSaturated", "RequestsWaitLong", "DeadlinesMissed")


def failing_engines(watched: Watched, faulty_endpoint: BackgroundServer) -> None:
    """Make a server answer 500, then stop it."""
    with load(watched.app.url, 2, model=MODEL, max_tokens=4):
        faulty_endpoint.engine.fails = True
        watched.expect("EnginesFail")
        faulty_endpoint.stop()
        watched.expect("NoReplica")
        watched.expect("EndpointDown")


def silent_and_dying_replicas(watched: Watched) -> None:
    """Suspend one replica, and kill one under load."""
    silent = watched.process("only-demo")
    for watchdog in silent.children():
        watchdog.kill()
    silent.suspend()
    try:
        watched.expect("StaleReplicas")
    finally:
        # Serve may already have replaced it.
        with contextlib.suppress(psutil.Error):
            silent.resume()
    watched.expect_resolved("StaleReplicas")
    with load(watched.app.url, 30):
        time.sleep(3)
        watched.process("only-demo").kill()
        watched.expect("ReplicasLost")


def slow_and_dying_schedulers(watched: Watched) -> None:
    """Suspend a scheduler repeatedly, then kill it repeatedly."""
    serving = 'ewsjf_pool_replicas{model="demo",state="open"} > 0'
    wait_for(lambda: watched.watcher.value(serving), PATIENCE_S)
    scheduler = watched.process("scheduler-demo")
    is_over = threading.Event()

    def suspend_repeatedly() -> None:
        while not is_over.is_set():
            scheduler.suspend()
            # Its watchdog kills it after half a second.
            time.sleep(0.25)
            scheduler.resume()
            time.sleep(0.15)

    halting = threading.Thread(target=suspend_repeatedly)
    with load(watched.app.url, 3, max_tokens=4):
        halting.start()
        try:
            watched.expect("SlowApplication")
        finally:
            is_over.set()
            halting.join()
        for _ in range(5):
            replaced = watched.process("scheduler-demo")
            replaced.kill()
            replaced.wait(10)
            wait_for(lambda: watched.watcher.value("ewsjf_gateways_connected > 0"), 60)
            time.sleep(5)
        watched.expect("SchedulerRestarts")


def lost_state(watched: Watched, state: Path) -> None:
    """Make saving of learned state fail."""
    shutil.rmtree(state)
    state.write_text("a file where the folder was")
    with load(watched.app.url, 2):
        watched.expect("StateNotSaved")
