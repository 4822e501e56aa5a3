"""Which queues does Refine-and-Prune find, how steady are they, and what do its switches do?

A sample of n lengths is drawn with replacement from the lengths of a workload, so that every n sees the same
distribution. Four kinds of rows: by workload and n, by switch, drift of the traffic, and time to learn.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import trace_sources
from experiments.partition.samples import Pair, Sample, drawn, drift_pairs, lengths_of
from serve_app.command import progress_bar
from serve_app.scheduling.policies.partition import Partition
from serve_app.settings_base import settings
from serve_app.simulation.batch import parallel
from serve_app.tuning import (
    DriftSettings,
    RefineAndPruneSettings,
    has_drifted,
    partition_distance,
    refine_and_prune,
)
from serve_app.tuning.partition.refine_and_prune import refine
from serve_app.tuning.partition.strategic_loop import queue_means

# Of the sample that others are compared with, and of the prompts that are routed to compare.
_REFERENCE_SEED, _PROMPTS_SEED = 99, 1_000
_PROMPTS = 5_000


@settings
class PartitionExperiment:
    """What is played.

    Attributes:
        workloads: by the name that they have in the table; several joined by `+`.
        sizes: of samples; the last one is the reference.
        kinds: algorithms of the first table.
        switches: algorithms of the second.
        switch_sizes: a small sample, the usual one, and a large one.
        timed_workload: whose lengths each kind is timed on, as many as the largest size.
        drift_pairs: samples that each drift test is repeated on.
        long_shares: of the mix after it has changed.
    """

    workloads: Mapping[str, str]
    sizes: tuple[int, ...]
    seeds: int
    kinds: Mapping[str, RefineAndPruneSettings]
    switches: Mapping[str, RefineAndPruneSettings]
    switch_sizes: tuple[int, int, int]
    timed_workload: str
    drift_pairs: int
    drift_workloads: tuple[str, ...]
    drift_mix: str
    long_shares: tuple[float, ...]


def play(settings: PartitionExperiment, context: Context) -> Iterator[Measurement]:
    """All four kinds of rows."""
    samples = {name: lengths_of(workload) for name, workload in settings.workloads.items()}
    cells = len(samples) * len(settings.sizes) * len(settings.kinds) + len(settings.switches)
    with progress_bar("partitions", cells) as advance:
        for row in _by_size(settings, samples, context):
            yield row
            advance()
        for row in _by_switch(settings, samples, context):
            yield row
            advance()
    yield from _by_drift(settings, context)
    yield from _times(settings, samples)


# By size


@dataclass(frozen=True)
class _SizeCell:
    lengths: Sample
    count: int
    seeds: int
    settings: RefineAndPruneSettings
    reference: Partition


def _by_size(
    settings: PartitionExperiment, samples: Mapping[str, Sample], context: Context
) -> Iterator[Measurement]:
    for name, lengths in samples.items():
        references = {
            kind: refine_and_prune(drawn(lengths, settings.sizes[-1], _REFERENCE_SEED), one)
            for kind, one in settings.kinds.items()
        }
        keys = [(count, kind) for count in settings.sizes for kind in settings.kinds]
        cells = [
            _SizeCell(lengths, count, settings.seeds, settings.kinds[kind], references[kind])
            for count, kind in keys
        ]
        for (count, kind), figures in zip(keys, parallel(_found, cells, context.jobs), strict=True):
            yield Measurement(
                key={"workload": name, "n": count, "kind": kind},
                seeds=range(settings.seeds),
                traces=trace_sources(settings.workloads[name]),
                figures=figures,
                settings=asdict(settings.kinds[kind]),
            )


def _found(cell: _SizeCell) -> dict[str, list[float]]:
    samples = [drawn(cell.lengths, cell.count, seed) for seed in range(cell.seeds)]
    partitions = [refine_and_prune(sample, cell.settings) for sample in samples]
    prompts = drawn(cell.lengths, _PROMPTS, _PROMPTS_SEED)
    return {
        "refined": [len(refine(sample, cell.settings)) for sample in samples],
        "queues": [len(partition) for partition in partitions],
        "least_share": [min(one.count for one in each.intervals) / cell.count for each in partitions],
        "moved": [partition_distance(partition, cell.reference, prompts) for partition in partitions],
    }


# By switch


@dataclass(frozen=True)
class _SwitchCell:
    samples: Mapping[str, Sample]
    sizes: tuple[int, int, int]
    seeds: int
    settings: RefineAndPruneSettings


def _by_switch(
    settings: PartitionExperiment, samples: Mapping[str, Sample], context: Context
) -> Iterator[Measurement]:
    cells = [
        _SwitchCell(samples, settings.switch_sizes, settings.seeds, one) for one in settings.switches.values()
    ]
    sources = {source for one in settings.workloads.values() for source in trace_sources(one)}
    for name, figures in zip(settings.switches, parallel(_switched, cells, context.jobs), strict=True):
        yield Measurement(
            key={"switch": name},
            seeds=range(settings.seeds),
            traces=sorted(sources, key=lambda one: one.name),
            figures=figures,
            settings=asdict(settings.switches[name]),
        )


def _switched(cell: _SwitchCell) -> dict[str, list[float]]:
    """Means over workloads, for each seed."""
    by_seed = []
    for seed in range(cell.seeds):
        found = [_of_sample(lengths, cell, seed) for lengths in cell.samples.values()]
        by_seed.append([statistics.fmean(column) for column in zip(*found, strict=True)])
    names = ("queues", "spread", "moved", "bubbles")
    return dict(zip(names, map(list, zip(*by_seed, strict=True)), strict=True))


def _of_sample(lengths: Sample, cell: _SwitchCell, seed: int) -> tuple[float, float, float, float]:
    """Queues, spread, moved and bubbles of one sample of each size."""
    small, usual, large = (
        refine_and_prune(drawn(lengths, count, seed + 10 * index), cell.settings)
        for index, count in enumerate(cell.sizes)
    )
    prompts = drawn(lengths, _PROMPTS, _PROMPTS_SEED + seed)
    spread = float(np.abs(np.log(prompts / queue_means(usual, prompts))).mean())
    return len(usual), spread, partition_distance(small, large, prompts), _bubble_share(usual, prompts)


def _bubble_share(partition: Partition, prompts: Sample) -> float:
    """Share of prompts in a gap, further than a tenth from either neighbour (Algorithm 2)."""
    starts = np.array([queue.min_tokens for queue in partition.intervals])
    ends = np.array([queue.max_tokens for queue in partition.intervals])
    below = np.searchsorted(starts, prompts, side="right") - 1
    above_lower = (below < 0) | (prompts > 1.1 * ends[np.clip(below, 0, None)])
    upper = np.append(starts, np.iinfo(np.int64).max)[below + 1]
    return float((above_lower & (prompts < 0.9 * upper)).mean())


# Drift


def _by_drift(settings: PartitionExperiment, context: Context) -> Iterator[Measurement]:
    pairs = drift_pairs(settings.drift_workloads, settings.drift_mix, settings.long_shares)
    cells = [(pair, settings.drift_pairs) for pair in pairs.values()]
    for name, figures in zip(pairs, parallel(_drifts, cells, context.jobs), strict=True):
        yield Measurement(
            key={"traffic": name},
            seeds=range(settings.drift_pairs),
            traces=trace_sources(name.partition(",")[0]),
            figures=figures,
            settings=asdict(DriftSettings()),
        )


def _drifts(cell: tuple[Pair, int]) -> dict[str, float]:
    pair, count = cell
    drifts = [has_drifted(*pair(seed), DriftSettings()) for seed in range(count)]
    return {
        "rings": statistics.fmean(drift.drifted for drift in drifts),
        "shift_median": statistics.median(drift.shift for drift in drifts),
    }


# Time


def _times(settings: PartitionExperiment, samples: Mapping[str, Sample]) -> Iterator[Measurement]:
    count = settings.sizes[-1]
    sample = drawn(samples[settings.timed_workload], count, 0)
    for kind, one in settings.kinds.items():
        began = time.perf_counter()
        refine_and_prune(sample, one)
        yield Measurement(
            key={"timed": kind},
            traces=trace_sources(settings.workloads[settings.timed_workload]),
            figures={"lengths": count, "seconds": time.perf_counter() - began},
            settings=asdict(one),
        )


EXPERIMENT = Experiment(settings=PartitionExperiment, play=play)
