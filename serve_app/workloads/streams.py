"""Streams of random numbers: one seed for a run, one named stream for each use.

Drawing more numbers for one use therefore changes no other.
"""

import random
import zlib

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """The numpy generator of one use (`arrivals`, `lengths`...) in the run with this seed."""
    return np.random.default_rng(_entropy(seed, name))


def plain_stream(seed: int, name: str) -> random.Random:
    """The same as `random.Random`, for the pure packages, which do not import numpy."""
    return random.Random(int(stream(seed, name).integers(1 << 62)))  # noqa: S311 - a simulation, no secret


def _entropy(seed: int, name: str) -> list[int]:
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return [seed, zlib.crc32(name.encode())]
