"""What does a fleet of endpoints cost in front, and how soon is a change of it noticed?

The endpoints are light servers in one process of their own. The application finds them in a file. Closed
loops send short streams; CPU time is read from the processes.
"""

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from experiments.common.application import Application, free_port, started_application
from experiments.common.closed_loop import ClosedLoop, Exchange
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.light_endpoint import MODEL
from experiments.common.light_servers import LightServers, role_beside_endpoints, started_light_servers
from experiments.common.processes import CpuMeter, process_tree
from experiments.common.provenance import generated
from serve_app.bench.bodies import BodyFactory, BodySettings
from serve_app.bench.connection import BenchError, ConnectionPool, Target
from serve_app.command import progress_bar
from serve_app.settings_base import settings
from serve_app.workloads.trace import TraceRequest

_REQUEST = TraceRequest(arrival_s=0.0, prompt_tokens=20, output_tokens=8)
_POLL_S = 0.02
_PATIENCE_S = 120.0
# Between two of the endpoints that are replaced under load.
_REPLACE_EVERY_S = 0.2
# For streams that run on the endpoints that were replaced.
_LAST_ANSWERS_S = 1.0


@settings
class EndpointFleetSettings:
    """What is played.

    Attributes:
        endpoints: sizes of the fleet, one application each.
        clients: that send one request after the other.
        requests: in each repeat.
        changes: endpoints that are added, and endpoints that die, one by one.
        replaced: endpoints that are replaced by others while requests run.
        idle_s: for how long the use of idle processes is measured.
    """

    endpoints: tuple[int, ...]
    clients: int
    requests: int
    repeats: int
    changes: int
    replaced: int
    idle_s: float = 10.0


@dataclass
class Fleet:
    """An application, its endpoints, and the file in which it finds them."""

    served: Application
    servers: LightServers
    file: Path
    ports: list[int]
    spare: list[int]

    def write(self) -> None:
        """Say in the file which endpoints there are."""
        _write(self.file, self.ports)

    def serving(self) -> set[int]:
        """Ports of the endpoints that get requests."""
        found = json.loads(self.served.fetched("/admin/endpoints"))["endpoints"]
        return {int(one["url"].rpartition(":")[2]) for one in found if one.get("state") == "serving"}

    def until(self, condition: Callable[[set[int]], bool]) -> float:
        """Wait for a state of the fleet; returns how long it took."""
        began = time.monotonic()
        while not condition(self.serving()):
            if time.monotonic() - began > _PATIENCE_S:
                raise BenchError(f"the fleet is not as it should be after {_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
        return time.monotonic() - began


def play(settings: EndpointFleetSettings, context: Context) -> Iterator[Measurement]:
    """Each size of the fleet."""
    with progress_bar("endpoints", len(settings.endpoints)) as advance:
        for count in settings.endpoints:
            if not context.has({"endpoints": count}):
                with _fleet_of(count, settings.replaced) as fleet:
                    yield Measurement(
                        key={"endpoints": count},
                        figures=_figures(fleet, settings),
                        traces=generated("requests of one size"),
                    )
            advance()


@contextmanager
def _fleet_of(count: int, spare: int) -> Iterator[Fleet]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = stack.enter_context(started_light_servers())
        first = free_port() + 500
        ports = list(range(first, first + count))
        for port in ports:
            servers.tell("open", port)
        file = folder / "endpoints"
        _write(file, ports)
        served = stack.enter_context(started_application("endpoints", [_model(file)]))
        fleet = Fleet(served, servers, file, ports, list(range(first + count, first + count + spare)))
        fleet.until(lambda serving: len(serving) == count)
        yield fleet


def _write(file: Path, ports: Sequence[int]) -> None:
    written = file.with_suffix(".new")
    written.write_text("".join(f"http://127.0.0.1:{port}\n" for port in ports), encoding="utf-8")
    written.rename(file)


def _model(file: Path) -> dict[str, Any]:
    remote = {"endpoints": [f"file://{file}"]}
    return {"name": MODEL, "pools": [{"name": "all", "engine": {"remote": remote}}]}


def _figures(fleet: Fleet, settings: EndpointFleetSettings) -> dict[str, Any]:
    meter = CpuMeter((fleet.served.pid,), role_beside_endpoints)
    # Connections, code paths and learned ratios are warm after it.
    _exchanges(fleet, settings.clients, max(settings.clients, settings.requests // 10))
    meter.calibrate(settings.idle_s)
    rates, used = [], []
    for _ in range(settings.repeats):
        before, began = meter.read(), time.monotonic()
        _exchanges(fleet, settings.clients, settings.requests)
        seconds = time.monotonic() - began
        rates.append(settings.requests / seconds)
        used.append(meter.used_since(before, seconds))
    memory = _memory_mb(fleet.served.pid)
    return {
        "per_s": rates,
        "cpu_ms": {
            role: [1_000 * one.get(role, 0.0) / settings.requests for one in used]
            for role in ("gateway", "scheduler", "haproxy", "watcher")
        },
        "idle_cores": {role: round(value, 4) for role, value in meter.idle_per_s.items()},
        "memory_mb": memory,
        "arrival_s": [_arrival_s(fleet) for _ in range(settings.changes)],
        "death_s": [_death_s(fleet, number) for number in range(settings.changes)],
        **_replacement(fleet, settings),
    }


def _arrival_s(fleet: Fleet) -> float:
    """From its line in the file until it gets requests; then it is taken away again."""
    port = fleet.spare[-1]
    fleet.servers.tell("open", port)
    fleet.ports.append(port)
    fleet.write()
    took_s = fleet.until(lambda serving: port in serving)
    fleet.ports.remove(port)
    fleet.write()
    fleet.until(lambda serving: port not in serving)
    fleet.servers.tell("close", port)
    return took_s


def _death_s(fleet: Fleet, number: int) -> float:
    """From the end of an endpoint until it gets no requests; then it comes back."""
    port = fleet.ports[number % len(fleet.ports)]
    fleet.servers.tell("close", port)
    took_s = fleet.until(lambda serving: port not in serving)
    fleet.servers.tell("open", port)
    fleet.until(lambda serving: port in serving)
    return took_s


def _replacement(fleet: Fleet, settings: EndpointFleetSettings) -> dict[str, Any]:
    """Replace endpoints one by one while requests run; the old ones end once nothing more is sent there."""
    replaced = min(settings.replaced, len(fleet.ports) - 1)
    old = fleet.ports[:replaced]
    ended = threading.Event()
    completed: list[int] = []
    failures: list[str] = []

    def load() -> None:
        while not ended.is_set():
            try:
                completed.append(len(_exchanges(fleet, settings.clients, settings.clients * 10)))
            except BenchError as error:
                failures.append(str(error))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for new in fleet.spare[:replaced]:
            fleet.ports.pop(0)
            fleet.servers.tell("open", new)
            fleet.ports.append(new)
            fleet.write()
            time.sleep(_REPLACE_EVERY_S)
        fleet.until(lambda serving: serving == set(fleet.ports))
        time.sleep(_LAST_ANSWERS_S)
        for port in old:
            fleet.servers.tell("close", port)
    finally:
        ended.set()
        thread.join()
    return {"replaced": replaced, "completed_meanwhile": sum(completed), "failures_meanwhile": failures}


def _exchanges(fleet: Fleet, clients: int, requests: int) -> list[Exchange]:
    return uvloop.run(_closed_loop(fleet.served.url, clients, requests))


async def _closed_loop(url: str, clients: int, requests: int) -> list[Exchange]:
    target = Target.parse(url)
    bodies = BodyFactory(BodySettings(model=MODEL, stream=True), target.authority)
    return await ClosedLoop(ConnectionPool(target), bodies, _REQUEST, stream=True).run(clients, requests)


def _memory_mb(pid: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for process in process_tree(pid):
        role = role_beside_endpoints(process)
        if role in ("gateway", "scheduler", "watcher"):
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            resident = next(line for line in lines if line.startswith("VmRSS"))
            found[role] = max(found.get(role, 0.0), int(resident.split()[1]) / 1_024)
    return {role: round(statistics.fmean([value]), 1) for role, value in found.items()}


EXPERIMENT = Experiment(settings=EndpointFleetSettings, play=play)
