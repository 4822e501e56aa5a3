"""What does the application cost per request, beside other proxies and beside nothing in between?

A cheap client sends requests to light engines straight, and through each of several systems in turn: nginx,
routers written in Rust, a bare forwarder, and the application with everything on. CPU time is read from the
processes, less what they use when idle in the same round. The quick start is
started, and left idle.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.light_endpoint import MODEL
from experiments.common.light_servers import LightServers
from experiments.common.processes import calibrate, process_tree
from experiments.common.provenance import generated
from experiments.common.rows import Key
from experiments.overhead.client import Client, Played, load_of, started_client
from experiments.overhead.footprint import quick_start_figures
from experiments.overhead.ours import started_direct, started_ours
from experiments.overhead.peers import (
    FORWARDER,
    missing_program,
    started_forwarder,
    started_nginx,
    started_router,
)
from experiments.overhead.system import (
    DIRECT,
    OURS,
    Endpoints,
    OverheadSettings,
    RequestKind,
    System,
    started_light_engines,
)
from serve_app.cli.command import progress_bar, warn
from serve_app.errors import SettingsError

REMOTE = "light"
TUNER = "tuner"
STARTED: Mapping[str, Callable[[Endpoints], AbstractContextManager[System]]] = {
    DIRECT: started_direct,
    "nginx": started_nginx,
    "smg": partial(started_router, "smg"),
    "vllm-router": partial(started_router, "vllm-router"),
    FORWARDER: started_forwarder,
    OURS: started_ours,
}
_PROGRAMS = {
    "nginx": "install the system's package",
    "smg": "scripts/setup peers",
    "vllm-router": "scripts/setup peers",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of a system.

    Attributes:
        cpu_ms: by role, per request, less idle use; that of the tuner with it.
        client_cpu_ms: of the client, per request.
    """

    played: Played
    cpu_ms: Mapping[str, float]
    client_cpu_ms: float


@dataclass(frozen=True, slots=True)
class Player:
    """Sends requests to systems that run, in turn.

    Attributes:
        light: the engines that are told what to answer.
    """

    settings: OverheadSettings
    client: Client
    systems: Sequence[System]
    model: str
    light: LightServers

    def samples(self, kinds: Sequence[str]) -> dict[tuple[str, int], dict[str, list[Sample]]]:
        """By kind and clients, and by system: one for each round."""
        settings = self.settings
        cells = [(name, clients) for name in kinds for clients in settings.requests[name].clients]
        found: dict[tuple[str, int], dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
        # Connections, code paths and learned ratios are warm after it.
        for name, clients in cells:
            for system in self.systems:
                self._sample(system, settings.requests[name], clients, settings.warm_up_s)
        with progress_bar("overhead", settings.rounds * len(cells)) as advance:
            for number in range(settings.rounds):
                calibrate([system.meter for system in self.systems], settings.idle_s)
                for system in self.systems:
                    # It works in bursts, whether requests come or not: an idle span tells nothing of another.
                    system.meter.idle_per_s.pop(TUNER, None)
                first = number % len(self.systems)
                for name, clients in cells:
                    for system in (*self.systems[first:], *self.systems[:first]):
                        sample = self._sample(system, settings.requests[name], clients, settings.seconds)
                        found[name, clients][system.name].append(sample)
                    advance()
        return found

    def _sample(self, system: System, kind: RequestKind, clients: int, seconds: float) -> Sample:
        load = load_of(kind, system, self.model, clients, seconds)
        self.light.tell("answer", kind.chunks, kind.pace_ms)
        before, client_before, began = system.meter.read(), self._client_cpu_s(), time.monotonic()
        played = self.client.play(load)
        used = system.meter.used_since(before, time.monotonic() - began)
        per_request = 1_000 / played.requests
        return Sample(
            played=played,
            cpu_ms={role: per_request * cpu_s for role, cpu_s in sorted(used.items())},
            client_cpu_ms=per_request * (self._client_cpu_s() - client_before),
        )

    def _client_cpu_s(self) -> float:
        return sum(process.cpu_s for process in process_tree(self.client.pid))


def play(settings: OverheadSettings, context: Context) -> Iterator[Measurement]:
    """Before light engines, then the quick start."""
    unknown = sorted(set(settings.kinds) - settings.requests.keys())
    unknown += sorted(set(settings.systems) - STARTED.keys())
    if unknown:
        raise SettingsError(f"no kind of request or system {', '.join(unknown)}: see config.yaml")
    with ExitStack() as stack:
        client = stack.enter_context(started_client())
        if _lacks(settings, context, REMOTE, settings.kinds):
            yield from _remote(settings, client)
    key = _key(settings, {"quick start": True})
    if settings.quick_start.starts and not context.has(key):
        yield Measurement(key=key, figures=quick_start_figures(settings.quick_start))


def _remote(settings: OverheadSettings, client: Client) -> Iterator[Measurement]:
    with ExitStack() as stack:
        light, endpoints = stack.enter_context(started_light_engines())
        systems = [stack.enter_context(STARTED[name](endpoints)) for name in _present(settings.systems)]
        player = Player(settings, client, systems, MODEL, light)
        samples = player.samples(settings.kinds)
    yield from _measurements(settings, REMOTE, systems, samples)


def _present(names: Sequence[str]) -> list[str]:
    """Those that this machine can start; of the others it is told why they are left out."""
    present = []
    for name in names:
        reason = missing_program(name, _PROGRAMS[name]) if name in _PROGRAMS else ""
        if reason:
            warn(f"overhead: {name} is left out: {reason}")
        else:
            present.append(name)
    return present


def _measurements(
    settings: OverheadSettings,
    engines: str,
    systems: Sequence[System],
    samples: Mapping[tuple[str, int], Mapping[str, Sequence[Sample]]],
) -> Iterator[Measurement]:
    for (name, clients), found in samples.items():
        yield Measurement(
            key=_cell_key(settings, engines, name, clients),
            figures={
                system.name: {"version": system.version, **figures_of(found[system.name])}
                for system in systems
            },
            traces=generated("requests of one size"),
        )


def figures_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Lists with one value for each round; times of the first token are comparable within a round."""
    roles = sorted({role for one in samples for role in one.cpu_ms})
    return {
        "requests": sum(one.played.requests for one in samples),
        "per_s": [one.played.requests / one.played.seconds for one in samples],
        "first_p50_ms": [one.played.first_p50_ms for one in samples],
        "first_p99_ms": [one.played.first_p99_ms for one in samples],
        "reads": fmean(one.played.reads for one in samples),
        "cpu_ms": {role: [one.cpu_ms.get(role, 0.0) for one in samples] for role in roles},
        "client_cpu_ms": fmean(one.client_cpu_ms for one in samples),
    }


def _lacks(settings: OverheadSettings, context: Context, engines: str, kinds: Sequence[str]) -> bool:
    """Whether a row is still to be measured."""
    keys = [
        _cell_key(settings, engines, name, clients)
        for name in kinds
        for clients in settings.requests[name].clients
    ]
    return not all(context.has(key) for key in keys)


def _cell_key(settings: OverheadSettings, engines: str, name: str, clients: int) -> Key:
    return _key(settings, {"engines": engines, "kind": name, "clients": clients})


def _key(settings: OverheadSettings, key: Key) -> Key:
    return {**key, "label": settings.label}


EXPERIMENT = Experiment(settings=OverheadSettings, play=play)
