"""Samples of prompt lengths: of a workload, of two spells of it, of a mix that has changed."""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import numpy.typing as npt

from serve_app.workloads.catalog import WorkloadSettings, resolve

Sample = npt.NDArray[np.int64]
Pair = Callable[[int], tuple[Sample, Sample]]
"""Makes a reference and a recent sample from a seed."""

_REFERENCE, _RECENT = 5_000, 500
# Workloads that are files give all of their requests.
_GENERATED_REQUESTS = {"paper-mix": 50_000, "lmsys": 50_000}
_SHORT_AT_TOKENS = 256


def lengths_of(workload: str) -> Sample:
    """The prompt lengths of a workload, in order of arrival; several joined by `+` follow each other."""
    return np.concatenate([_lengths(name) for name in workload.split("+")])


def _lengths(name: str) -> Sample:
    trace = resolve(WorkloadSettings(trace=name, requests=_GENERATED_REQUESTS.get(name)))
    return np.array([request.prompt_tokens for request in trace.requests])


def drawn(lengths: Sample, count: int, seed: int) -> Sample:
    """A sample of that size, with replacement: every size sees the same distribution."""
    return np.random.default_rng(seed).choice(lengths, count)


def drift_pairs(workloads: Iterable[str], mix: str, long_shares: Iterable[float]) -> dict[str, Pair]:
    """The traffic that the drift test is tried on, by name."""
    pairs: dict[str, Pair] = {}
    for name in workloads:
        lengths = lengths_of(name)
        pairs[f"{name}, independent samples"] = partial(_fresh_pair, lengths, lengths)
        pairs[f"{name}, as it came"] = partial(_spell_pair, lengths)
    before = lengths_of(mix)
    for share in long_shares:
        changed = _with_long_share(before, share)
        pairs[f"{mix}, {share:.0%} long"] = partial(_fresh_pair, before, changed)
    return pairs


def _fresh_pair(before: Sample, now: Sample, seed: int) -> tuple[Sample, Sample]:
    """A reference and a recent sample, drawn independently."""
    return drawn(before, _REFERENCE, seed), drawn(now, _RECENT, 10_000 + seed)


def _spell_pair(lengths: Sample, seed: int) -> tuple[Sample, Sample]:
    """Requests that came after one another, and those that came next."""
    both = _REFERENCE + _RECENT
    start = int(np.random.default_rng(seed).integers(0, len(lengths) - both))
    return lengths[start : start + _REFERENCE], lengths[start + _REFERENCE : start + both]


def _with_long_share(mix: Sample, share: float) -> Sample:
    """The mix with another share of long prompts."""
    short, long = mix[mix <= _SHORT_AT_TOKENS], mix[mix > _SHORT_AT_TOKENS]
    count = round(share * len(short) / (1 - share))
    return np.concatenate([short, drawn(long, count, 0)])
