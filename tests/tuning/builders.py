"""Queues, lengths to learn them from, and engines of another speed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.lab.simulation.simulation import ReplicaPlan

Sample = npt.NDArray[np.int64]


def interval(min_tokens: int, max_tokens: int, mean_tokens: float, count: int) -> LengthInterval:
    return LengthInterval(min_tokens=min_tokens, max_tokens=max_tokens, mean_tokens=mean_tokens, count=count)


def extents(partition: Partition) -> list[tuple[int, int]]:
    return [(queue.min_tokens, queue.max_tokens) for queue in partition.intervals]


def paper_mix(count: int, seed: int) -> Sample:
    """Return 80 % of 32 to 256 tokens, 20 % of 1,024 to 4,096."""
    rng = np.random.default_rng(seed)
    short = rng.random(count) < 0.8
    return np.where(short, rng.integers(32, 257, count), rng.integers(1024, 4097, count))


def heavy_tail(count: int, seed: int) -> Sample:
    """Return log-normal lengths with a median of 400 tokens: one in a hundred exceeds 6,500."""
    drawn = np.random.default_rng(seed).lognormal(np.log(400), 1.2, count)
    return np.clip(drawn, 1, 131_072).astype(np.int64)


def with_speed(engines: Sequence[ReplicaPlan], factor: float) -> tuple[ReplicaPlan, ...]:
    """Return the same engines with every iteration `factor` times as long."""
    return tuple(replace(engine, step_time=engine.step_time.scaled(factor)) for engine in engines)
