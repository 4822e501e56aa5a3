#!/usr/bin/env python
"""What is prefix affinity worth on conversations, and what does it cost per request?

    .venv/bin/python scripts/bench_prefix.py                     # simulated conversations
    .venv/bin/python scripts/bench_prefix.py --loads 0.5 --seeds 1 --requests 2000
    .venv/bin/python scripts/bench_prefix.py --micro             # microseconds of hashing and of a look-up

Plays the conversations of `workloads/conversations.py` with affinity, without (every request goes to the
replica with the least load of all), and without any gateway, in turn and to the less busy of two.

Columns (means over the seeds; the first fifth of requests, while caches fill, is not in the TTFT):

    hits        prompt tokens that engines took from their prefix caches, of all that they looked up
    TTFT        from arrival, in seconds
    tokens/s    prompt and output tokens over the whole run

Load 1.0 is the rate at which the same replicas finish the same requests under FCFS by load alone, their
caches working as they do then.

What it cannot show: how well a real engine's evictions are foretold, tokens of text whose estimate is wrong
(prompts here have exact lengths), and clients that wait for an answer before they ask again.
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from serve_app.command import positive_float, positive_int, progress_bar
from serve_app.metrics.record import RequestRecord
from serve_app.routing.prefix.index import PrefixIndex
from serve_app.serving.gateway.request.prefix import Opening, prefix_hashes
from serve_app.simulation.direct import Balance, DirectSimulation
from serve_app.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.simulation.replica import SimulatedReplica
from serve_app.simulation.scheduler_settings import scheduler_settings
from serve_app.simulation.simulation import Simulation
from serve_app.simulation.workload import Disclosure, requests_of
from serve_app.workloads.conversations import ConversationSettings, conversations
from serve_app.workloads.trace import Trace
from serve_app.workloads.transform import scale_to_rate

_WARM_UP = 0.2
_DRAWN_RATE_PER_S = 10.0


@dataclass(frozen=True)
class Variant:
    """One way to choose a replica; no policy is no gateway."""

    name: str
    policy: str | None
    affinity: bool = False
    balance: Balance = Balance.ROUND_ROBIN


VARIANTS = (
    Variant("round-robin, no gateway", None),
    Variant("power of two, no gateway", None, balance=Balance.POWER_OF_TWO),
    Variant("fcfs, by load", "fcfs"),
    Variant("fcfs, affinity", "fcfs", affinity=True),
    Variant("ewsjf, by load", "ewsjf"),
    Variant("ewsjf, affinity", "ewsjf", affinity=True),
)


@dataclass(frozen=True)
class Figures:
    """What came of one run."""

    hit_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tokens_per_s: float


def main() -> int:
    """Play and print."""
    args = arguments()
    if args.micro:
        micro_benchmark()
        return 0
    fleet = FleetSettings(profile=args.profile, replicas={ONE_POOL: args.replicas})
    print("| load | requests/s | choice | hits | TTFT mean | p50 | p95 | tokens/s |")
    print("|---|---|---|---|---|---|---|---|")
    traces = [
        conversations(args.requests, _DRAWN_RATE_PER_S, seed, ConversationSettings(pause_s=args.pause))
        for seed in range(args.seeds)
    ]
    rates = [saturated_rate_per_s(fleet, trace) for trace in traces]
    with progress_bar("runs", len(args.loads) * len(VARIANTS) * args.seeds) as advance:
        for load in args.loads:
            for variant in VARIANTS:
                runs = []
                for trace, rate in zip(traces, rates, strict=True):
                    runs.append(play(variant, fleet, scale_to_rate(trace, load * rate)))
                    advance()
                print(row(load, load * statistics.fmean(rates), variant, runs), flush=True)
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="llama31-8b-rtx4090-tp1", help="(%(default)s)")
    parser.add_argument("--replicas", type=positive_int, default=8, help="(%(default)s)")
    parser.add_argument("--requests", type=positive_int, default=3_000, help="in each run (%(default)s)")
    parser.add_argument("--seeds", type=positive_int, default=3, help="(%(default)s)")
    parser.add_argument("--loads", type=positive_float, nargs="+", default=[0.5, 0.8, 0.95])
    parser.add_argument(
        "--pause", type=positive_float, default=30.0, help="seconds between turns, at 10 requests/s"
    )
    parser.add_argument("--micro", action="store_true", help="measure hashing and look-ups instead")
    return parser.parse_args()


def saturated_rate_per_s(fleet: FleetSettings, trace: Trace) -> float:
    """Requests per second of the fleet when it never runs out of work, chosen by load alone."""
    records, _ = outcome(Variant("", "fcfs"), fleet, scale_to_rate(trace, 1_000.0))
    return len(records) / max(record.finished_at for record in records)


def play(variant: Variant, fleet: FleetSettings, trace: Trace) -> Figures:
    """One run, in figures."""
    records, replicas = outcome(variant, fleet, trace)
    records.sort(key=lambda record: record.arrived_at)
    measured = [record.ttft_s for record in records[round(_WARM_UP * len(records)) :]]
    ttft_s = sorted(time_s for time_s in measured if time_s is not None)
    end_s = max(record.finished_at for record in records)
    snapshots = [replica.model.snapshot(end_s) for replica in replicas]
    queries = sum(snapshot.prefix_queries_tokens for snapshot in snapshots)
    return Figures(
        hit_ratio=sum(snapshot.prefix_hits_tokens for snapshot in snapshots) / max(1, queries),
        ttft_mean_s=statistics.fmean(ttft_s),
        ttft_p50_s=ttft_s[len(ttft_s) // 2],
        ttft_p95_s=ttft_s[int(0.95 * len(ttft_s))],
        tokens_per_s=sum(record.prompt_tokens + record.output_tokens for record in records) / end_s,
    )


def outcome(
    variant: Variant, fleet: FleetSettings, trace: Trace
) -> tuple[list[RequestRecord], list[SimulatedReplica]]:
    """The records of one run, and the replicas as they are after it."""
    plans = fleet.plans(isolated=variant.policy == "ewsjf")
    requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    if variant.policy is None:
        direct = DirectSimulation(plans, variant.balance)
        return direct.run(requests), direct.replicas
    changes = {"affinity.enabled": variant.affinity}
    world = Simulation(scheduler_settings(variant.policy, fleet.routing, changes), plans)
    return world.run(requests), list(world.replicas.values())


def row(load: float, rate_per_s: float, variant: Variant, runs: list[Figures]) -> str:
    """A line of the table."""

    def mean(of: Callable[[Figures], float]) -> float:
        return statistics.fmean(of(run) for run in runs)

    return (
        f"| {load:g} | {rate_per_s:.1f} | {variant.name} | {mean(lambda run: run.hit_ratio):.1%} "
        f"| {mean(lambda run: run.ttft_mean_s):.3f} | {mean(lambda run: run.ttft_p50_s):.3f} "
        f"| {mean(lambda run: run.ttft_p95_s):.3f} | {mean(lambda run: run.tokens_per_s):,.0f} |"
    )


def micro_benchmark() -> None:
    """Microseconds per call, the best of several rounds."""
    for size in (1_000, 10_000, 100_000, 1_000_000):
        text = "A prompt of some words, and then some more. " * (size // 44 + 1)
        hash_text = partial(prefix_hashes, Opening(b"text", (text,)), model="m")
        print(f"hash {size:>9,} bytes: {microseconds(hash_text, max(5, 2_000_000 // size)):8.1f} us")
    for replicas in (10, 100, 1_000):
        measure_index(replicas)


def measure_index(replicas: int) -> None:
    """Microseconds of a look-up and of a dispatch, which evicts what it adds."""
    index, prompts = filled_index(replicas)
    chosen, added = itertools.cycle(prompts), itertools.cycle(prompts)
    found_us = microseconds(lambda: index.better_than("s0", next(chosen), 8), 2_000)
    added_us = microseconds(lambda: index.add("s1", next(added)), 2_000)
    print(f"{replicas:>5,} replicas, {len(index):>7,} blocks, prompts of 48 blocks:", end=" ")
    print(f"look-up {found_us:6.1f} us, dispatch {added_us:6.1f} us")


def filled_index(replicas: int) -> tuple[PrefixIndex, list[tuple[int, ...]]]:
    """An index of full shelves; every prompt begins with one of twelve sets of 8 blocks."""
    rng = random.Random(1)  # noqa: S311 - a measurement, no secret
    index = PrefixIndex(500_000)
    for number in range(replicas):
        index.join(f"s{number}", 300_000)
    shared = [tuple(rng.getrandbits(64) for _ in range(8)) for _ in range(12)]
    prompts = [(*rng.choice(shared), *(rng.getrandbits(64) for _ in range(40))) for _ in range(replicas * 60)]
    for place, prompt in enumerate(prompts):
        index.add(f"s{place % replicas}", prompt)
    return index, prompts[-2_000:]


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Time of one call."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - began) / calls)
    return min(rounds) * 1e6


if __name__ == "__main__":
    sys.exit(main())
