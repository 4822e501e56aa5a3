"""Affinity: its worth on conversations and sessions, and its cost per request.

Simulates conversations with affinity, without it (each request goes to the replica with the least load), and
without any gateway, in turn and to the less loaded of two. All choices get the same requests at the same
times.

Load 1.0 is the rate at which the same replicas finish the same requests under FCFS by load alone, with the
cache hits that this gives.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from operator import call
from typing import Literal

from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.load_balancers import LMetric, PowerOfTwo, RoundRobin, StickyUntilSaturated
from experiments.common.provenance import generated
from experiments.placement.sessions import SESSIONS, ConversationSettings, conversations
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.prefix import PrefixIndex
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import (
    ONE_POOL,
    DirectSimulation,
    Disclosure,
    EngineChanges,
    FleetSettings,
    parallel,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedReplica, Simulation
from serve_app.lab.workloads import Trace, scale_to_rate
from serve_app.serving.gateway.request.fields import CompletionFields
from serve_app.serving.gateway.request.measure import completion_prompt

_ROUNDS = 5
_LOOKUPS = 2_000
_HASHED_BYTES_A_ROUND = 2_000_000
# Capacity of the index in blocks, in all and for one replica.
_CAPACITY, _SHELF = 500_000, 300_000
# Prompts have 48 blocks, and begin with one of 12 openings.
_OPENINGS, _OPENING_BLOCKS, _OWN_BLOCKS = 12, 8, 40
_PROMPTS_PER_REPLICA = 60


def hashing_us(size: int) -> float:
    """Return the microseconds to hash a text of this many bytes."""
    text = "A prompt of some words, and then some more. " * (size // 44 + 1)
    prompt = completion_prompt(CompletionFields(model="m", prompt=text))
    call = partial(prompt.prefix_hashes, model="m")
    return _microseconds(call, max(_ROUNDS, _HASHED_BYTES_A_ROUND // size))


def index_us(replicas: int) -> dict[str, float]:
    """Return microseconds of a look-up and of a dispatch, which evicts what it adds; and the blocks held."""
    index, prompts = _filled_index(replicas)
    found, added = itertools.cycle(prompts), itertools.cycle(prompts)
    return {
        "lookup_us": _microseconds(lambda: index.better_than("s0", next(found), 8), _LOOKUPS),
        "dispatch_us": _microseconds(lambda: index.add("s1", next(added)), _LOOKUPS),
        "blocks": len(index),
    }


def _filled_index(replicas: int) -> tuple[PrefixIndex, list[tuple[int, ...]]]:
    """Return an index of full shelves, and the most recent prompts."""
    rng = random.Random(1)  # noqa: S311 - a measurement, no secret
    index = PrefixIndex(_CAPACITY)
    for number in range(replicas):
        index.join(f"s{number}", _SHELF)
    shared = [tuple(rng.getrandbits(64) for _ in range(_OPENING_BLOCKS)) for _ in range(_OPENINGS)]
    prompts = [
        (*rng.choice(shared), *(rng.getrandbits(64) for _ in range(_OWN_BLOCKS)))
        for _ in range(replicas * _PROMPTS_PER_REPLICA)
    ]
    for place, prompt in enumerate(prompts):
        index.add(f"s{place % replicas}", prompt)
    return index, prompts[-_LOOKUPS:]


def _microseconds(call: Callable[[], object], calls: int) -> float:
    """Return the time of one call in the best of several rounds: other processes only add to it."""
    rounds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - began) / calls)
    return min(rounds) * 1e6


_WARM_UP_RATIO = 0.2
# Rate at which conversations are drawn, before they are scaled to a load.
_DRAWN_RATE_PER_S = 10.0
_AT_ONCE_PER_S = 1_000.0


@settings
class ReplicaChoice:
    """One way to choose a replica.

    Attributes:
        policy: of the gateway's queue; None for no gateway.
        affinity: with a gateway, whether cached prefixes count.
        balance: without a gateway.
        chunk_tokens: the engines' limit on tokens of one prompt per iteration; 0 for none, as engines have.
    """

    policy: str | None = None
    affinity: bool = False
    balance: Literal["round-robin", "power-of-two", "lmetric", "sticky"] = "round-robin"
    chunk_tokens: int = 0


@settings
class SessionSettings:
    """Settings of the runs with one workload of `SESSIONS`.

    Attributes:
        rates_per_s: turns per second and four replicas, by size of the fleet.
        requests: in each run, per four replicas.
    """

    profile: str
    rates_per_s: Mapping[int, tuple[float, ...]]
    choices: Mapping[str, ReplicaChoice]
    requests: int
    seeds: tuple[int, ...]


@settings
class AffinitySettings:
    """Settings of the part.

    Attributes:
        choices: by their names in the table.
        requests: in each run.
        seeds: runs of each, with the seeds 0, 1, ...
        pause_s: between the turns of a conversation, at 10 requests/s.
        hashed_bytes: lengths of the texts whose hashing is timed.
        indexed_replicas: sizes of the fleets whose index is timed.
        sessions: runs with other workloads, by their names in `SESSIONS`.
    """

    profile: str
    replicas: int
    loads: tuple[float, ...]
    choices: Mapping[str, ReplicaChoice]
    requests: int
    seeds: int
    pause_s: float = 30.0
    hashed_bytes: tuple[int, ...] = ()
    indexed_replicas: tuple[int, ...] = ()
    sessions: Mapping[str, SessionSettings] = field(default_factory=dict)

    def fleet(self) -> FleetSettings:
        """Return a fleet with all replicas in one pool."""
        return FleetSettings(profile=self.profile, replicas={ONE_POOL: self.replicas})

    def trace(self, seed: int) -> Trace:
        """Return the conversations of a seed."""
        settings = ConversationSettings(pause_s=self.pause_s)
        return conversations(self.requests, _DRAWN_RATE_PER_S, seed, settings)


Figures = Mapping[str, float]


def play(settings: AffinitySettings, context: Context) -> Iterator[Measurement]:
    """Measure every choice at every load, then the costs."""
    seeds = range(settings.seeds)
    rates = list(parallel(_saturated_rate_per_s, [(settings, seed) for seed in seeds], context.jobs))
    cells = [
        Cell(
            key={"load": load, "choice": name},
            runs=[
                partial(_play, settings, choice, seed, load * rate)
                for seed, rate in zip(seeds, rates, strict=True)
            ],
            seeds=seeds,
            traces=generated("conversations"),
        )
        for load in settings.loads
        for name, choice in settings.choices.items()
    ]
    yield from play_cells("affinity", cells, call, context)
    yield from _sessions(settings.sessions, context)
    yield from _costs(settings)


def _sessions(workloads: Mapping[str, SessionSettings], context: Context) -> Iterator[Measurement]:
    if unknown := workloads.keys() - SESSIONS.keys():
        raise SettingsError(f"no workload {', '.join(sorted(unknown))}: there are {', '.join(SESSIONS)}")
    cells = [
        Cell(
            key={"workload": workload, "replicas": replicas, "rate_per_s": rate, "rule": name},
            runs=[partial(play_sessions, workload, one, choice, replicas, rate, seed) for seed in one.seeds],
            seeds=one.seeds,
            traces=generated(workload),
        )
        for workload, one in workloads.items()
        for replicas, rates in one.rates_per_s.items()
        for rate in rates
        for name, choice in one.choices.items()
    ]
    return play_cells("sessions", cells, call, context)


def play_sessions(
    workload: str,
    settings: SessionSettings,
    choice: ReplicaChoice,
    replicas: int,
    rate_per_s: float,
    seed: int,
) -> Figures:
    """Play a workload of sessions with one choice, at a rate for four replicas."""
    share = replicas / 4
    fleet = FleetSettings(profile=settings.profile, replicas={ONE_POOL: replicas})
    trace = SESSIONS[workload].trace(round(settings.requests * share), rate_per_s * share, seed)
    return _figures(*_outcome(choice, fleet, trace))


def _costs(settings: AffinitySettings) -> Iterator[Measurement]:
    """Measure hashing and the index in microseconds of one core."""
    for size in settings.hashed_bytes:
        yield Measurement(key={"cost": "hash", "bytes": size}, figures={"us": hashing_us(size)})
    for replicas in settings.indexed_replicas:
        yield Measurement(key={"cost": "index", "replicas": replicas}, figures=index_us(replicas))


def _saturated_rate_per_s(of: tuple[AffinitySettings, int]) -> float:
    """Return the fleet's requests per second when it never runs out of work, placed by load alone."""
    settings, seed = of
    trace = scale_to_rate(settings.trace(seed), _AT_ONCE_PER_S)
    records, _ = _outcome(ReplicaChoice(policy="fcfs"), settings.fleet(), trace)
    return len(records) / max(record.finished_at for record in records)


def _play(settings: AffinitySettings, choice: ReplicaChoice, seed: int, rate_per_s: float) -> Figures:
    trace = scale_to_rate(settings.trace(seed), rate_per_s)
    return {"rate_per_s": rate_per_s, **_figures(*_outcome(choice, settings.fleet(), trace))}


def _figures(records: list[RequestRecord], replicas: list[SimulatedReplica]) -> Figures:
    measured = after_warm_up(records)
    end_s = max(record.finished_at for record in records)
    snapshots = [replica.model.snapshot(end_s) for replica in replicas]
    queries = sum(snapshot.prefix_queries_tokens for snapshot in snapshots)
    return {
        # Share of looked-up prompt tokens that engines had in their caches.
        "hit_ratio": sum(snapshot.prefix_hits_tokens for snapshot in snapshots) / max(1, queries),
        **ttft_figures(measured),
        "tpot_mean_s": statistics.fmean(record.tpot_s for record in measured if record.tpot_s is not None),
        "tokens_per_s": sum(record.prompt_tokens + record.output_tokens for record in records) / end_s,
    }


def after_warm_up(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the records without the first fifth of arrivals, while caches fill and speeds are unknown."""
    ordered = sorted(records, key=lambda record: record.arrived_at)
    return ordered[round(_WARM_UP_RATIO * len(ordered)) :]


def ttft_figures(records: Sequence[RequestRecord]) -> Figures:
    """Return mean and percentiles of TTFT."""
    ttft_s = sorted(record.ttft_s for record in records if record.ttft_s is not None)
    return {
        "ttft_mean_s": statistics.fmean(ttft_s),
        "ttft_p50_s": ttft_s[len(ttft_s) // 2],
        "ttft_p95_s": ttft_s[int(0.95 * len(ttft_s))],
        "ttft_p99_s": ttft_s[int(0.99 * len(ttft_s))],
    }


_BALANCERS: Mapping[str, Callable[[Sequence[ReplicaPlan]], DirectSimulation]] = {
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "lmetric": LMetric,
    "sticky": StickyUntilSaturated,
}


def _outcome(
    choice: ReplicaChoice, fleet: FleetSettings, trace: Trace
) -> tuple[list[RequestRecord], list[SimulatedReplica]]:
    """Return the records of one run, and the replicas after it."""
    engine = EngineChanges(long_prefill_token_threshold=choice.chunk_tokens)
    plans = replace(fleet, engine=engine).plans()
    requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    if choice.policy is None:
        direct = _BALANCERS[choice.balance](plans)
        return direct.run(requests), direct.replicas
    changes = {"affinity.enabled": choice.affinity}
    simulation = Simulation(scheduler_settings(choice.policy, fleet.routing, changes), plans)
    return simulation.run(requests), list(simulation.replicas.values())


EXPERIMENT = Experiment(settings=AffinitySettings, play=play)
