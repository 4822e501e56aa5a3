"""What is prefix affinity worth on conversations, and what does it cost per request?

Plays conversations with affinity, without it (each request goes to the replica with the least load), and
without any gateway, in turn and to the less busy of two. All choices meet the same requests at the same
times.

Load 1.0 is the rate at which the same replicas finish the same requests under FCFS by load alone, their
caches working as they do then.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.common.rows import Key
from experiments.prefix.cost import hashing_us, index_us
from serve_app.command import progress_bar
from serve_app.metrics.record import RequestRecord
from serve_app.settings_base import settings
from serve_app.simulation.batch import parallel
from serve_app.simulation.direct import Balance, DirectSimulation
from serve_app.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.simulation.replica import SimulatedReplica
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import Simulation
from serve_app.simulation.workload import Disclosure, requests_of
from serve_app.workloads.conversations import ConversationSettings, conversations
from serve_app.workloads.trace import Trace
from serve_app.workloads.transform import scale_to_rate

# The first fifth of requests, while caches fill, is not in the TTFT.
_WARM_UP_RATIO = 0.2
# Rate at which conversations are drawn, before they are scaled to a load.
_DRAWN_RATE_PER_S = 10.0
_AT_ONCE_PER_S = 1_000.0


@settings
class ReplicaChoice:
    """One way to choose a replica.

    Attributes:
        policy: of the gateway's queue; None is no gateway.
        affinity: with a gateway, whether cached prefixes count.
        balance: without a gateway.
    """

    policy: str | None = None
    affinity: bool = False
    balance: Balance = Balance.ROUND_ROBIN


@settings
class PrefixSettings:
    """What is played.

    Attributes:
        choices: by the name that they have in the table.
        requests: in each run.
        seeds: runs of each, with the seeds 0, 1, ...
        pause_s: between the turns of a conversation, at 10 requests/s.
        hashed_bytes: lengths of the texts whose hashing is timed.
        indexed_replicas: sizes of the fleets whose index is timed.
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

    def fleet(self) -> FleetSettings:
        """All replicas in one pool."""
        return FleetSettings(profile=self.profile, replicas={ONE_POOL: self.replicas})

    def trace(self, seed: int) -> Trace:
        """The conversations of a seed."""
        settings = ConversationSettings(pause_s=self.pause_s)
        return conversations(self.requests, _DRAWN_RATE_PER_S, seed, settings)


@dataclass(frozen=True, slots=True)
class Run:
    """One choice at one load with one seed."""

    settings: PrefixSettings
    choice: ReplicaChoice
    load: float
    seed: int
    saturated_per_s: float


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What came of one run.

    Attributes:
        hit_ratio: prompt tokens that engines took from their caches, of all that they looked up.
        tokens_per_s: prompt and output tokens over the whole run.
    """

    hit_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tokens_per_s: float


def play(settings: PrefixSettings, context: Context) -> Iterator[Measurement]:
    """Every choice at every load, then the costs."""
    seeds = range(settings.seeds)
    rates = list(parallel(_saturated_rate_per_s, [(settings, seed) for seed in seeds], context.jobs))
    cells = [(load, name) for load in settings.loads for name in settings.choices]
    with progress_bar("prefix", len(cells)) as advance:
        for load, name in cells:
            key: Key = {"load": load, "choice": name}
            if not context.has(key):
                choice = settings.choices[name]
                runs = [Run(settings, choice, load, *of_seed) for of_seed in zip(seeds, rates, strict=True)]
                yield _measurement(key, list(parallel(_play, runs, context.jobs)), rates, load)
            advance()
    yield from _costs(settings)


def _measurement(key: Key, runs: list[RunFigures], rates: list[float], load: float) -> Measurement:
    columns = [asdict(run) for run in runs]
    figures = {name: [one[name] for one in columns] for name in columns[0]}
    return Measurement(
        key=key,
        seeds=range(len(runs)),
        traces=generated("conversations"),
        figures={"rate_per_s": [load * rate for rate in rates], **figures},
    )


def _costs(settings: PrefixSettings) -> Iterator[Measurement]:
    """What hashing and the index cost in microseconds of one core."""
    for size in settings.hashed_bytes:
        yield Measurement(key={"cost": "hash", "bytes": size}, figures={"us": hashing_us(size)})
    for replicas in settings.indexed_replicas:
        yield Measurement(key={"cost": "index", "replicas": replicas}, figures=index_us(replicas))


def _saturated_rate_per_s(of: tuple[PrefixSettings, int]) -> float:
    """Requests per second of the fleet when it never runs out of work, chosen by load alone."""
    settings, seed = of
    trace = scale_to_rate(settings.trace(seed), _AT_ONCE_PER_S)
    records, _ = _outcome(ReplicaChoice(policy="fcfs"), settings.fleet(), trace)
    return len(records) / max(record.finished_at for record in records)


def _play(run: Run) -> RunFigures:
    trace = scale_to_rate(run.settings.trace(run.seed), run.load * run.saturated_per_s)
    records, replicas = _outcome(run.choice, run.settings.fleet(), trace)
    records.sort(key=lambda record: record.arrived_at)
    measured = [record.ttft_s for record in records[round(_WARM_UP_RATIO * len(records)) :]]
    ttft_s = sorted(time_s for time_s in measured if time_s is not None)
    end_s = max(record.finished_at for record in records)
    snapshots = [replica.model.snapshot(end_s) for replica in replicas]
    queries = sum(snapshot.prefix_queries_tokens for snapshot in snapshots)
    return RunFigures(
        hit_ratio=sum(snapshot.prefix_hits_tokens for snapshot in snapshots) / max(1, queries),
        ttft_mean_s=statistics.fmean(ttft_s),
        ttft_p50_s=ttft_s[len(ttft_s) // 2],
        ttft_p95_s=ttft_s[int(0.95 * len(ttft_s))],
        tokens_per_s=sum(record.prompt_tokens + record.output_tokens for record in records) / end_s,
    )


def _outcome(
    choice: ReplicaChoice, fleet: FleetSettings, trace: Trace
) -> tuple[list[RequestRecord], list[SimulatedReplica]]:
    """The records of one run, and the replicas as they are after it."""
    plans = fleet.plans(isolated=choice.policy == "ewsjf")
    requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    if choice.policy is None:
        direct = DirectSimulation(plans, choice.balance)
        return direct.run(requests), direct.replicas
    changes = {"affinity.enabled": choice.affinity}
    simulation = Simulation(scheduler_settings(choice.policy, fleet.routing, changes), plans)
    return simulation.run(requests), list(simulation.replicas.values())


EXPERIMENT = Experiment(settings=PrefixSettings, play=play)
