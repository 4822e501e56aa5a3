"""What does the application cost per request, compared with other proxies and with no proxy?

A cheap client sends requests to light engines directly, and through each of several systems in turn: nginx,
routers written in Rust, a bare forwarder, and the application with everything on. CPU time is that of the
processes, less their idle use in the same round. The quick start is started and left idle.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from experiments.common.application import served_application
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.light_endpoint import LightServers
from experiments.common.peers import (
    REMEDIES,
    Endpoints,
    System,
    missing_program,
    started_nginx,
    started_router,
)
from experiments.common.processes import CpuMeter, calibrate, process_tree, role_of
from experiments.common.provenance import generated
from experiments.common.rows import Key
from experiments.overhead.client import Client, Played, load_of, started_client
from experiments.overhead.peers import FORWARDER, started_direct, started_forwarder, started_ours
from experiments.overhead.system import (
    DIRECT,
    OURS,
    OverheadSettings,
    QuickStartSettings,
    RequestKind,
    TurnSettings,
    started_light_engines,
)
from serve_app.cli.command import progress_bar, warn
from serve_app.errors import SettingsError

_QUICK_START = Path(__file__).resolve().parents[2] / "configs" / "local.yaml"
REMOTE = "light"
TUNER = "tuner"
Cell = tuple[str, int]
"""A kind of request, and the number of clients that send it."""
STARTED: Mapping[str, Callable[[Endpoints], AbstractContextManager[System]]] = {
    DIRECT: started_direct,
    "nginx": started_nginx,
    "smg": partial(started_router, "smg"),
    "vllm-router": partial(started_router, "vllm-router"),
    FORWARDER: started_forwarder,
    OURS: started_ours,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of a system.

    Attributes:
        cpu_ms: by role, per request, less idle use; the tuner's includes it.
    """

    played: Played
    cpu_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Player:
    """Sends requests to running systems in turn.

    Attributes:
        light: the engines, whose answers are set for each kind.
    """

    settings: TurnSettings
    client: Client
    systems: Sequence[System]
    light: LightServers

    def samples(self, cells: Sequence[Cell]) -> dict[Cell, dict[str, list[Sample]]]:
        """Return samples by kind and clients, and by system: one for each round."""
        settings = self.settings
        found: dict[Cell, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        # This warms up connections, code paths and learned ratios.
        for name, clients in cells:
            for system in self.systems:
                self._sample(system, settings.requests[name], clients, settings.warm_up_s)
        with progress_bar("turns", settings.rounds * len(cells)) as advance:
            for number in range(settings.rounds):
                calibrate([system.meter for system in self.systems], settings.idle_s)
                for system in self.systems:
                    # The tuner works in bursts, independent of requests: one idle span does not predict
                    # another.
                    system.meter.idle_per_s.pop(TUNER, None)
                first = number % len(self.systems)
                for name, clients in cells:
                    for system in (*self.systems[first:], *self.systems[:first]):
                        sample = self._sample(system, settings.requests[name], clients, settings.seconds)
                        found[name, clients][system.name].append(sample)
                    advance()
        return found

    def _sample(self, system: System, kind: RequestKind, clients: int, seconds: float) -> Sample:
        load = load_of(kind, system, clients, seconds)
        self.light.tell("answer", kind.chunks, kind.pace_ms)
        before, began = system.meter.read(), time.monotonic()
        played = self.client.play(load)
        used = system.meter.used_since(before, time.monotonic() - began)
        per_request = 1_000 / played.requests
        return Sample(
            played=played,
            cpu_ms={role: per_request * cpu_s for role, cpu_s in sorted(used.items())},
        )


def play(settings: OverheadSettings, context: Context) -> Iterator[Measurement]:
    """Measure in front of light engines, then the quick start."""
    unknown = sorted(set(settings.kinds) - settings.requests.keys())
    unknown += sorted(set(settings.systems) - STARTED.keys())
    if unknown:
        raise SettingsError(f"no kind of request or system {', '.join(unknown)}: see config.yaml")
    cells = [(name, clients) for name in settings.kinds for clients in settings.requests[name].clients]
    if not all(context.has(_cell_key(*cell)) for cell in cells):
        yield from _before_light_engines(settings, cells)
    key = {"quick start": True}
    if settings.quick_start.starts and not context.has(key):
        yield Measurement(key=key, figures=quick_start_figures(settings.quick_start))


def _before_light_engines(settings: OverheadSettings, cells: Sequence[Cell]) -> Iterator[Measurement]:
    with ExitStack() as stack:
        client = stack.enter_context(started_client())
        light, endpoints = stack.enter_context(started_light_engines())
        systems = [stack.enter_context(STARTED[name](endpoints)) for name in _present(settings.systems)]
        samples = Player(settings, client, systems, light).samples(cells)
    for cell, found in samples.items():
        yield Measurement(
            key=_cell_key(*cell),
            figures={
                system.name: {"version": system.version, **figures_of(found[system.name])}
                for system in systems
            },
            traces=generated("requests of one size"),
        )


def _present(names: Sequence[str]) -> list[str]:
    """Return the systems that this machine can start, and report why the others are left out."""
    present = []
    for name in names:
        reason = missing_program(name, REMEDIES[name]) if name in REMEDIES else ""
        if reason:
            warn(f"overhead: {name} is left out: {reason}")
        else:
            present.append(name)
    return present


def figures_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return lists with one value for each round; times of the first token are comparable within a round."""
    return {
        "requests": sum(one.played.requests for one in samples),
        "per_s": [one.played.requests / one.played.seconds for one in samples],
        "first_p50_ms": [one.played.first_p50_ms for one in samples],
        "first_p99_ms": [one.played.first_p99_ms for one in samples],
        "cpu_ms": _by_role([one.cpu_ms for one in samples]),
    }


def _cell_key(name: str, clients: int) -> Key:
    return {"engines": REMOTE, "kind": name, "clients": clients}


def quick_start_figures(settings: QuickStartSettings) -> dict[str, Any]:
    """Return lists with one value for each start, by role where it is known."""
    starts = [_start(settings) for _ in range(settings.starts)]
    return {
        "start_s": [one["start_s"] for one in starts],
        "processes": [one["processes"] for one in starts],
        "memory_mb": _by_role([one["memory_mb"] for one in starts]),
        "idle_cores": _by_role([one["idle_cores"] for one in starts]),
    }


def _start(settings: QuickStartSettings) -> dict[str, Any]:
    config = yaml.safe_load(_QUICK_START.read_text(encoding="utf-8"))
    began = time.monotonic()
    with served_application(config) as served:
        start_s = time.monotonic() - began
        time.sleep(settings.settle_s)
        meter = CpuMeter((served.pid,))
        calibrate([meter], settings.idle_s)
        memory: dict[str, float] = {}
        family = process_tree(served.pid)
        for process in family:
            role = role_of(process)
            memory[role] = memory.get(role, 0.0) + _pss_mb(process)
    return {
        "start_s": start_s,
        "processes": len(family),
        "memory_mb": memory,
        "idle_cores": dict(meter.idle_per_s),
    }


def _pss_mb(process: psutil.Process) -> float:
    """Return the process's own memory plus its share of shared memory; 0 if it has ended."""
    try:
        return float(process.memory_full_info().pss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0


def _by_role(rounds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    roles = sorted({role for one in rounds for role in one})
    return {role: [one.get(role, 0.0) for one in rounds] for role in roles}


EXPERIMENT = Experiment(settings=OverheadSettings, play=play)
