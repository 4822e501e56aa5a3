"""What do gateway and scheduler cost by chunks, body size, tenants and programs, and what by feature?

Light engines and a cheap client, as in `overhead`. Several applications run at the same time: the base, and
others that differ from it in one feature, or in the number of tenants or programs. They receive short bursts
of requests in turn. One base also serves answers of several lengths and bodies of several sizes. CPU time is
that of the processes, less idle use.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.light_endpoint import LightServers
from experiments.common.peers import Endpoints, System, next_port
from experiments.common.provenance import TraceSource, generated
from experiments.common.rows import Key
from experiments.cost.bursts import Bursts, played
from experiments.cost.variants import BASE, VARIANTS, started_variant
from experiments.overhead.client import Client, started_client
from experiments.overhead.run import Player, figures_of
from experiments.overhead.system import RequestKind, TurnSettings, started_light_engines
from serve_app.core.settings_base import NOT_NEGATIVE, at_least, settings
from serve_app.errors import SettingsError

CHUNKS, BODY_BYTES, FEATURE = "chunks", "body_bytes", "feature"
"""Parts of the experiment."""
_CONTEXT_TOKENS = 8_192
_TRACES: tuple[TraceSource, ...] = generated("requests of one size")


@dataclass(frozen=True, slots=True)
class Bench:
    """Client, engines and a collector of traces.

    Attributes:
        collector_port: receives traces and discards them.
    """

    client: Client
    light: LightServers
    endpoints: Endpoints
    collector_port: int

    @contextmanager
    def started(self, names: Sequence[str]) -> Iterator[list[System]]:
        """Start the applications of variants, all at the same time."""
        starting = [started_variant(name, self.endpoints, self.collector_port) for name in names]
        with ExitStack() as stack:
            with ThreadPoolExecutor() as threads:
                systems = list(threads.map(stack.enter_context, starting))
            yield systems


@settings
class CostSettings(TurnSettings):
    """Settings of the experiment.

    Attributes:
        clients: that each send one request after another.
        chunks: lengths of streamed answers to small requests.
        pace_ms: between two chunks.
        body_bytes: sizes of requests whose answer is not streamed.
        groups: names of variants that run at the same time, beside the base.
        blocks: number of figures of each variant, each over `cycles`.
        cycles: bursts in each block, by kind of request.
        burst: requests of one burst, by kind of request.
    """

    clients: Annotated[int, at_least(1)]
    chunks: tuple[Annotated[int, at_least(1)], ...]
    pace_ms: Annotated[float, NOT_NEGATIVE]
    body_bytes: tuple[Annotated[int, at_least(10)], ...]
    groups: tuple[tuple[str, ...], ...]
    blocks: Annotated[int, at_least(1)]
    cycles: Mapping[str, Annotated[int, at_least(1)]]
    burst: Mapping[str, Annotated[int, at_least(1)]]


def play(settings: CostSettings, context: Context) -> Iterator[Measurement]:
    """Measure one group of variants after another; answers and bodies with the base of the first."""
    if unknown := sorted({name for group in settings.groups for name in group} - VARIANTS.keys()):
        raise SettingsError(f"no variant {', '.join(unknown)}: there are {', '.join(VARIANTS)}")
    with ExitStack() as stack:
        client = stack.enter_context(started_client())
        light, endpoints = stack.enter_context(started_light_engines())
        collector_port = next_port()
        light.tell("open", collector_port, _CONTEXT_TOKENS)
        bench = Bench(client, light, endpoints, collector_port)
        for number, group in enumerate(settings.groups):
            keys = [_feature_key(name, kind) for name in group for kind in settings.requests]
            if not all(map(context.has, keys)):
                yield from _measured(settings, group, bench, sweeps=number == 0)


def _measured(
    settings: CostSettings, group: Sequence[str], bench: Bench, *, sweeps: bool
) -> Iterator[Measurement]:
    """Measure the variants of a group beside the base.

    Args:
        sweeps: whether the base also serves answers and bodies of all sizes.
    """
    with bench.started((BASE, *group)) as systems:
        for name, kind in settings.requests.items():
            bench.light.tell("answer", kind.chunks, kind.pace_ms)
            bursts = Bursts(
                kind=kind,
                clients=settings.clients,
                requests=settings.burst[name],
                cycles=settings.cycles[name],
                blocks=settings.blocks,
            )
            found = played(bursts, systems, settings.idle_s)
            for variant in group:
                figures = {"base": {"cpu_ms": found[BASE]}, "variant": {"cpu_ms": found[variant]}}
                yield Measurement(key=_feature_key(variant, name), figures=figures, traces=_TRACES)
        if sweeps:
            yield from _swept(settings, systems[0], bench)


def _swept(settings: CostSettings, system: System, bench: Bench) -> Iterator[Measurement]:
    """Measure one application with every length of answers and every size of bodies."""
    streams = {
        (CHUNKS, chunks): RequestKind(chunks=chunks, pace_ms=settings.pace_ms) for chunks in settings.chunks
    }
    bodies = {(BODY_BYTES, size): RequestKind(body_bytes=size) for size in settings.body_bytes}
    kinds = {f"{part} {value}": kind for (part, value), kind in (streams | bodies).items()}
    player = Player(replace(settings, requests=kinds), bench.client, [system], bench.light)
    samples = player.samples([(kind, settings.clients) for kind in kinds])
    for part, value in streams | bodies:
        found = samples[f"{part} {value}", settings.clients][system.name]
        yield Measurement(key={"part": part, "value": value}, figures=figures_of(found), traces=_TRACES)


def _feature_key(name: str, kind: str) -> Key:
    return {"part": FEATURE, "feature": name, "kind": kind}


EXPERIMENT = Experiment(settings=CostSettings, play=play)
