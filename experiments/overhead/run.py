"""What does the application cost per request, beside the same engine with nothing in front of it?

Closed loops send small requests and streams to the application (HAProxy, gateway, scheduler, one replica) and
to the same emulated engine alone, in turn, so that both meet the same machine. CPU time is read from the
processes, less what they use when idle.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from experiments.common.application import started_application
from experiments.common.closed_loop import ClosedLoop, Exchange
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.processes import CpuMeter, ProcessUse, role_of
from experiments.common.provenance import generated
from experiments.common.rows import Key
from experiments.overhead.engine import started_engine
from serve_app.bench.bodies import BodyFactory, BodySettings
from serve_app.bench.connection import ConnectionPool, Target
from serve_app.command import progress_bar
from serve_app.settings_base import settings
from serve_app.workloads.trace import TraceRequest

MODEL = "instant"
ALONE = "engine alone"
_PROMPT_TOKENS = 20
_SETTLE_S = 5.0


@settings
class RequestKind:
    """One kind of request.

    Attributes:
        requests: how many are enough for a figure, by the number of clients.
    """

    stream: bool
    output_tokens: int
    requests: Mapping[int, int]


@settings
class OverheadSettings:
    """What is played.

    Attributes:
        engine, engine_advanced: of both, an emulated one.
        idle_s: for how long the use of idle processes is measured.
        warm_up_share: of the requests, which are sent before anything is measured.
    """

    engine: Mapping[str, Any]
    engine_advanced: Mapping[str, Any]
    kinds: Mapping[str, RequestKind]
    repeats: int
    idle_s: float = 10.0
    warm_up_share: float = 0.1

    def cells(self) -> list[tuple[str, int, int]]:
        """Kind, clients and requests of each row."""
        return [(name, *size) for name, kind in self.kinds.items() for size in kind.requests.items()]


@dataclass(frozen=True, slots=True)
class Sample:
    """One closed loop.

    Attributes:
        first_ms: median time to the first token; to the end, without a stream.
        reads: pieces in which an answer came, in the mean.
        cpu_ms: by role, per request, less idle use.
    """

    per_s: float
    first_ms: float
    reads: float
    cpu_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Player:
    """Sends to both, and reads what their processes used."""

    settings: OverheadSettings
    app_url: str
    engine_url: str
    meter: CpuMeter

    def pair(self, kind: RequestKind, clients: int, requests: int) -> tuple[Sample, Sample]:
        """Straight to the engine, then through the application."""
        straight, through = (
            self._sample(url, kind, clients, requests) for url in (self.engine_url, self.app_url)
        )
        return straight, through

    def _sample(self, url: str, kind: RequestKind, clients: int, requests: int) -> Sample:
        before, began = self.meter.read(), time.monotonic()
        exchanges = uvloop.run(_exchange(url, kind, clients, requests))
        seconds = time.monotonic() - began
        used = self.meter.used_since(before, seconds)
        return Sample(
            per_s=requests / seconds,
            first_ms=1_000 * statistics.median(one.first_s for one in exchanges),
            reads=statistics.fmean(one.reads for one in exchanges),
            cpu_ms={role: 1_000 * cpu_s / requests for role, cpu_s in sorted(used.items())},
        )


def play(settings: OverheadSettings, context: Context) -> Iterator[Measurement]:
    """Every kind with every number of clients, repeat by repeat."""
    cells = settings.cells()
    if all(context.has(_key(name, clients)) for name, clients, _ in cells):
        return
    with (
        started_application("overhead", [model(settings)]) as served,
        started_engine(MODEL, {**settings.engine, **settings.engine_advanced}) as (engine, engine_url),
    ):
        meter = CpuMeter((served.pid, engine), lambda one: _role(one, engine))
        player = Player(settings, served.url, engine_url, meter)
        # Connections, code paths and learned ratios are warm after it.
        for name, clients, requests in cells:
            player.pair(settings.kinds[name], clients, max(clients, round(settings.warm_up_share * requests)))
        time.sleep(min(_SETTLE_S, settings.idle_s))
        meter.calibrate(settings.idle_s)
        samples = _samples(settings, player)
    idle_ms = {role: 1_000 * used for role, used in sorted(meter.idle_per_s.items())}
    yield Measurement(key={"idle": True}, figures={"cpu_ms_per_s": idle_ms})
    for name, clients, _ in cells:
        yield _measurement(_key(name, clients), samples[name, clients])


def model(settings: OverheadSettings) -> dict[str, Any]:
    """One pool with the engine."""
    engine = {"emulated": {**settings.engine, "advanced": dict(settings.engine_advanced)}}
    return {"name": MODEL, "pools": [{"name": "all", "engine": engine, "resources": {"num_cpus": 0.1}}]}


def _samples(
    settings: OverheadSettings, player: Player
) -> dict[tuple[str, int], list[tuple[Sample, Sample]]]:
    cells = settings.cells()
    samples: dict[tuple[str, int], list[tuple[Sample, Sample]]] = {cell[:2]: [] for cell in cells}
    with progress_bar("overhead", settings.repeats * len(cells)) as advance:
        for _repeat in range(settings.repeats):
            for name, clients, requests in cells:
                samples[name, clients].append(player.pair(settings.kinds[name], clients, requests))
                advance()
    return samples


def _measurement(key: Key, pairs: Sequence[tuple[Sample, Sample]]) -> Measurement:
    straight, through = zip(*pairs, strict=True)
    roles = sorted({role for one in through for role in one.cpu_ms} - {ALONE})
    return Measurement(
        key=key,
        figures={
            "straight_per_s": [one.per_s for one in straight],
            "per_s": [one.per_s for one in through],
            "straight_first_ms": [one.first_ms for one in straight],
            "first_ms": [one.first_ms for one in through],
            "reads": [one.reads for one in through],
            "cpu_ms": {role: [one.cpu_ms.get(role, 0.0) for one in through] for role in roles},
            "alone_cpu_ms": [one.cpu_ms.get(ALONE, 0.0) for one in straight],
        },
        traces=generated("requests of one size"),
    )


async def _exchange(url: str, kind: RequestKind, clients: int, requests: int) -> list[Exchange]:
    target = Target.parse(url)
    bodies = BodyFactory(BodySettings(model=MODEL, stream=kind.stream), target.authority)
    request = TraceRequest(arrival_s=0.0, prompt_tokens=_PROMPT_TOKENS, output_tokens=kind.output_tokens)
    return await ClosedLoop(ConnectionPool(target), bodies, request, stream=kind.stream).run(
        clients, requests
    )


def _key(name: str, clients: int) -> Key:
    return {"kind": name, "clients": clients}


def _role(process: ProcessUse, engine: int) -> str:
    return ALONE if process.pid == engine else role_of(process)


EXPERIMENT = Experiment(settings=OverheadSettings, play=play)
