#!/usr/bin/env python
"""Which queues does Refine-and-Prune find, how steady are they, and what do its switches do?

    .venv/bin/python scripts/bench_partition.py
    .venv/bin/python scripts/bench_partition.py --seeds 3 --json OUT.json

A sample of n lengths is drawn with replacement from the lengths of a workload, so that every n sees the same
distribution. Azure's workloads are the traces where they have been fetched, otherwise generated from their
percentiles; `azure` is both merged.

First table, by workload and n, for the published algorithm (`paper`: alpha 1.5, `released`: 5.5) and ours:

    queues    found by coarse and refine > left after pruning; the median over seeds
    least     share of the smallest queue, %; the least over seeds
    moved     by how much the mean length of a prompt's queue differs from that at n = 50,000, %, on average
              over prompts; the median over seeds (`partition_distance`)

Second table, switch by switch at n = 10,000, as means over workloads:

    spread    mean |ln| of a prompt's length over its queue's mean, %: how much order first come, first served
              inside a queue gives away
    moved     as above, between n = 1,000 and 50,000
    bubbles   share of fresh prompts that routing would put into bubble queues, %

Third table: how often the drift test rings between a reference of 5,000 and a recent 500 prompts, % of 200
pairs: for independent samples of the same traffic, for consecutive spells of the trace itself, and for the
paper's mix when its share of long prompts changes from 20 % to the one named.

What it cannot show: which partition schedules best; that takes the simulator.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serve_app.provenance import commit, hardware
from serve_app.scheduling.policies.partition import Partition
from serve_app.tuning import DriftSettings, RefineAndPruneSettings, distance, has_drifted, refine_and_prune
from serve_app.tuning.partition.partition_distance import queue_means
from serve_app.tuning.partition.refine_and_prune import refine
from serve_app.tuning.partition.settings import PAPER, RELEASED
from serve_app.workloads.catalog import WorkloadSettings, resolve

Sample = npt.NDArray[np.int64]

SIZES = (500, 1_000, 5_000, 10_000, 50_000)
OURS = RefineAndPruneSettings()
KINDS = {"paper": PAPER, "released": RELEASED, "ours": OURS}
SWITCHES = {
    "ours": OURS,
    "alpha 1": replace(OURS, alpha=1.0),
    "alpha 3": replace(OURS, alpha=3.0),
    "alpha 5.5": replace(OURS, alpha=5.5),
    "smooth keep": replace(OURS, smooth="keep"),
    "prune merge-highest": replace(OURS, prune="merge-highest"),
    "prune merge-lowest": replace(OURS, prune="merge-lowest"),
    "bounds midpoint": replace(OURS, bounds="midpoint"),
    "max_queues 8": replace(OURS, max_queues=8),
    "max_queues 8, merge-highest": replace(OURS, max_queues=8, prune="merge-highest"),
    "max_queues 8, merge-lowest": replace(OURS, max_queues=8, prune="merge-lowest"),
    "max_queues 16": replace(OURS, max_queues=16),
    "max_queues 64": replace(OURS, max_queues=64),
    "relative_range 0.1": replace(OURS, relative_range=0.1),
    "relative_range 0.3": replace(OURS, relative_range=0.3),
    "min_share 0.02": replace(OURS, min_share=0.02),
    "paper": PAPER,
    "paper, merge-lowest": replace(PAPER, prune="merge-lowest"),
    "paper, bounds midpoint": replace(PAPER, bounds="midpoint"),
    "released": RELEASED,
}


def main() -> int:
    """Measure, and print the three tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="samples of each size (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows, with provenance")
    arguments = parser.parse_args()
    traffic = workloads()
    tables = {
        "sizes": by_size(traffic, arguments.seeds),
        "switches": by_switch(traffic, arguments.seeds),
        "drift": by_drift(traffic),
    }
    for rows in tables.values():
        print(table(rows) + "\n")
    times = {name: seconds(traffic["lmsys"], settings) for name, settings in KINDS.items()}
    print("seconds for 50,000 lengths of lmsys: " + json.dumps(times))
    if arguments.json is not None:
        provenance = {
            "commit": commit(),
            "seeds": arguments.seeds,
            "hardware": hardware(),
            "settings": {name: asdict(settings) for name, settings in SWITCHES.items()},
        }
        result = tables | {"seconds": times, "provenance": provenance}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def workloads() -> dict[str, Sample]:
    """The prompt lengths of each workload, in order of arrival."""
    counts = {"paper-mix": 50_000, "azure-code": None, "azure-conv": None, "lmsys": 50_000}
    lengths: dict[str, Sample] = {}
    for name, requests in counts.items():
        trace = resolve(WorkloadSettings(trace=name, requests=requests))
        lengths[name] = np.array([request.prompt_tokens for request in trace.requests])
        print(f"{name}: {trace.source}", file=sys.stderr)
    lengths["azure"] = np.concatenate([lengths["azure-code"], lengths["azure-conv"]])
    return lengths


def drawn(lengths: Sample, count: int, seed: int) -> Sample:
    """A sample of that size."""
    return np.random.default_rng(seed).choice(lengths, count)


def by_size(traffic: dict[str, Sample], seeds: int) -> list[dict[str, str]]:
    """The first table."""
    rows = []
    for name, lengths in traffic.items():
        references = {
            kind: refine_and_prune(drawn(lengths, SIZES[-1], 99), settings)
            for kind, settings in KINDS.items()
        }
        for count in SIZES:
            row = {"workload": name, "n": f"{count:,}"}
            for kind, settings in KINDS.items():
                row |= found(lengths, (count, seeds), settings, references[kind], kind)
            rows.append(row)
    return rows


def found(
    lengths: Sample,
    size: tuple[int, int],
    settings: RefineAndPruneSettings,
    reference: Partition,
    kind: str,
) -> dict[str, str]:
    """The three columns of one algorithm; `size` is the number of lengths and of seeds."""
    count, seeds = size
    samples = [drawn(lengths, count, seed) for seed in range(seeds)]
    refined = [len(refine(sample, settings)) for sample in samples]
    partitions = [refine_and_prune(sample, settings) for sample in samples]
    prompts = drawn(lengths, 5_000, 1000)
    queues = statistics.median(len(partition) for partition in partitions)
    least = min(queue.count / count for partition in partitions for queue in partition.intervals)
    moved = statistics.median(distance(partition, reference, prompts) for partition in partitions)
    return {
        f"{kind}: queues": f"{statistics.median(refined):.0f} > {queues:.0f}",
        f"{kind}: least": f"{100 * least:.2f}",
        f"{kind}: moved": f"{100 * moved:.1f}",
    }


def by_switch(traffic: dict[str, Sample], seeds: int) -> list[dict[str, str]]:
    """The second table."""
    rows = []
    for name, settings in SWITCHES.items():
        figures = [
            of_partition(lengths, settings, seed) for lengths in traffic.values() for seed in range(seeds)
        ]
        queues, spread, moved, bubbles = np.mean(figures, axis=0)
        rows.append(
            {
                "switch": name,
                "queues": f"{queues:.1f}",
                "spread": f"{100 * spread:.1f}",
                "moved": f"{100 * moved:.1f}",
                "bubbles": f"{100 * bubbles:.2f}",
            }
        )
    return rows


def of_partition(
    lengths: Sample, settings: RefineAndPruneSettings, seed: int
) -> tuple[float, float, float, float]:
    """Queues, spread, moved and bubbles of one sample of each size."""
    small, usual, large = (
        refine_and_prune(drawn(lengths, count, seed + 10 * index), settings)
        for index, count in enumerate((1_000, 10_000, 50_000))
    )
    prompts = drawn(lengths, 5_000, 1000 + seed)
    spread = float(np.abs(np.log(prompts / queue_means(usual, prompts))).mean())
    return len(usual), spread, distance(small, large, prompts), bubble_share(usual, prompts)


def bubble_share(partition: Partition, prompts: Sample) -> float:
    """Share of prompts in a gap, further than a tenth from either neighbour (Algorithm 2)."""
    starts = np.array([queue.min_tokens for queue in partition.intervals])
    ends = np.array([queue.max_tokens for queue in partition.intervals])
    below = np.searchsorted(starts, prompts, side="right") - 1
    above_lower = (below < 0) | (prompts > 1.1 * ends[np.clip(below, 0, None)])
    upper = np.append(starts, np.iinfo(np.int64).max)[below + 1]
    return float((above_lower & (prompts < 0.9 * upper)).mean())


def by_drift(traffic: dict[str, Sample], pairs: int = 200) -> list[dict[str, str]]:
    """The third table."""
    rows = []
    for name in ("azure-code", "azure-conv", "lmsys"):
        lengths = traffic[name]
        rows.append(drift_row(f"{name}, same", partial(fresh_pair, lengths, lengths), pairs))
        rows.append(drift_row(f"{name}, as it came", partial(spell_pair, lengths), pairs))
    mix = traffic["paper-mix"]
    for share in (0.25, 0.3, 0.35, 0.4, 0.5):
        changed = with_long_share(mix, share)
        rows.append(drift_row(f"paper-mix, {share:.0%} long", partial(fresh_pair, mix, changed), pairs))
    return rows


def drift_row(name: str, pair: Callable[[int], tuple[Sample, Sample]], pairs: int) -> dict[str, str]:
    """How often the test rings, and the median shift."""
    drifts = [has_drifted(*pair(seed), DriftSettings()) for seed in range(pairs)]
    return {
        "traffic": name,
        "rings": f"{100 * statistics.fmean(drift.drifted for drift in drifts):.1f}",
        "shift": f"{statistics.median(drift.shift for drift in drifts):.3f}",
    }


def fresh_pair(before: Sample, now: Sample, seed: int) -> tuple[Sample, Sample]:
    """A reference and a recent sample, drawn independently."""
    return drawn(before, 5_000, seed), drawn(now, 500, 10_000 + seed)


def spell_pair(lengths: Sample, seed: int) -> tuple[Sample, Sample]:
    """5,000 requests that came after one another, and the 500 after them."""
    start = int(np.random.default_rng(seed).integers(0, len(lengths) - 5_500))
    return lengths[start : start + 5_000], lengths[start + 5_000 : start + 5_500]


def with_long_share(mix: Sample, share: float) -> Sample:
    """The paper's mix with another share of long prompts."""
    short, long = mix[mix <= 256], mix[mix > 256]
    count = round(share * len(short) / (1 - share))
    return np.concatenate([short, drawn(long, count, 0)])


def seconds(lengths: Sample, settings: RefineAndPruneSettings) -> float:
    """Wall-clock time of learning from 50,000 lengths."""
    sample = drawn(lengths, 50_000, 0)
    began = time.perf_counter()
    refine_and_prune(sample, settings)
    return round(time.perf_counter() - began, 3)


def table(rows: list[dict[str, str]]) -> str:
    """All rows, in columns."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
