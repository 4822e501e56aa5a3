"""Lengths to learn from, and how far two partitions are apart."""

import numpy as np
import numpy.typing as npt

from serve_app.scheduling.partition import LengthInterval, Partition

Sample = npt.NDArray[np.int64]


def interval(min_tokens: int, max_tokens: int, mean_tokens: float, count: int) -> LengthInterval:
    return LengthInterval(min_tokens=min_tokens, max_tokens=max_tokens, mean_tokens=mean_tokens, count=count)


def extents(partition: Partition) -> list[tuple[int, int]]:
    return [(queue.min_tokens, queue.max_tokens) for queue in partition.intervals]


def paper_mix(count: int, seed: int) -> Sample:
    """80 % of 32 to 256 tokens, 20 % of 1,024 to 4,096."""
    rng = np.random.default_rng(seed)
    short = rng.random(count) < 0.8
    return np.where(short, rng.integers(32, 257, count), rng.integers(1024, 4097, count))


def heavy_tail(count: int, seed: int) -> Sample:
    """Log-normal lengths with a median of 400 tokens: one in a hundred is longer than 6,500."""
    drawn = np.random.default_rng(seed).lognormal(np.log(400), 1.2, count)
    return np.clip(drawn, 1, 131_072).astype(np.int64)


def queue_means(partition: Partition, lengths: Sample) -> npt.NDArray[np.float64]:
    """The mean length of the queue that each prompt goes to: what the score sees of it."""
    starts = [queue.min_tokens for queue in partition.intervals]
    means = np.array([queue.mean_tokens for queue in partition.intervals])
    return means[np.clip(np.searchsorted(starts, lengths, side="right") - 1, 0, None)]


def distance(first: Partition, second: Partition, lengths: Sample) -> float:
    """How differently two partitions see the same prompts: mean |ln| of the ratio of their queues' means."""
    ratios = queue_means(first, lengths) / queue_means(second, lengths)
    return float(np.abs(np.log(ratios)).mean())
