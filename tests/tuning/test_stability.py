"""Stability of learned queues: the same traffic gives the same queues for any sample size.

Tolerance between a sample of 500 to 20,000 requests and one of 50,000 of the same distribution: the number of
queues differs by at most a quarter or three, whichever is more. The queues of the same prompts have mean
lengths that differ by at most 45 % on average (`partition_distance`), and by a quarter from 5,000 requests
on. The published refinement differs by several times as much.
"""

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.policies.length_queues import Partition
from serve_app.lab.workloads import WorkloadSettings, resolve
from serve_app.tuning.strategic_loop import (
    PAPER,
    RefineAndPruneSettings,
    partition_distance,
    refine_and_prune,
)
from tests.tuning.builders import Sample, heavy_tail, paper_mix

STABLE = RefineAndPruneSettings()
MANY = 50_000
DISTANCE, DISTANCE_OF_MANY = 0.45, 0.25


def lmsys(count: int, seed: int) -> Sample:
    trace = resolve(WorkloadSettings(trace="lmsys", requests=count, seed=seed))
    return np.array([request.prompt_tokens for request in trace.requests])


def allowed_difference(queues: int) -> float:
    return max(3, queues / 4)


def holds_the_least_share(partition: Partition, requests: int) -> bool:
    return all(queue.count >= STABLE.min_share * requests for queue in partition.intervals)


@pytest.mark.application
@pytest.mark.parametrize("traffic", [paper_mix, heavy_tail, lmsys])
def test_queues_stay_nearly_the_same_from_500_to_50000_requests(
    traffic: Callable[[int, int], Sample],
) -> None:
    reference = refine_and_prune(traffic(MANY, 100), STABLE)
    prompts = traffic(4000, 101)

    for count in (500, 1000, 5000, 20_000):
        for seed in range(4):
            found = refine_and_prune(traffic(count, seed), STABLE)
            assert abs(len(found) - len(reference)) <= allowed_difference(len(reference))
            assert partition_distance(found, reference, prompts) <= (
                DISTANCE_OF_MANY if count >= 5000 else DISTANCE
            )
            assert holds_the_least_share(found, count)


def test_the_published_refinement_exceeds_the_same_tolerance() -> None:
    reference = refine_and_prune(lmsys(MANY, 100), PAPER)
    found = refine_and_prune(lmsys(1000, 1), PAPER)

    assert partition_distance(found, reference, lmsys(4000, 101)) > 2 * DISTANCE


@st.composite
def mixtures(draw: st.DrawFn) -> Callable[[int, int], Sample]:
    """Draw one to three log-normal kinds of prompts, each with at least a tenth of the requests."""
    kinds = draw(
        st.lists(
            st.tuples(st.floats(20, 30_000), st.floats(0.05, 1.5), st.floats(0.2, 1.0)),
            min_size=1,
            max_size=3,
        )
    )
    medians, sigmas, shares = (np.array(column) for column in zip(*kinds, strict=True))

    def traffic(count: int, seed: int) -> Sample:
        rng = np.random.default_rng(seed)
        kind = rng.choice(len(kinds), count, p=shares / shares.sum())
        drawn = np.exp(np.log(medians)[kind] + sigmas[kind] * rng.standard_normal(count))
        lengths: Sample = np.clip(drawn, 1, 10**6).astype(np.int64)
        return lengths

    return traffic


@settings(max_examples=25, deadline=None)
@given(traffic=mixtures(), count=st.integers(500, 20_000), seed=st.integers(0, 1000))
def test_the_queues_of_any_traffic_are_few_and_hold_the_least_share_at_any_size(
    traffic: Callable[[int, int], Sample], count: int, seed: int
) -> None:
    reference = refine_and_prune(traffic(MANY, 2000), STABLE)
    found = refine_and_prune(traffic(count, seed), STABLE)

    assert max(len(found), len(reference)) < STABLE.max_queues
    assert holds_the_least_share(found, count)
    assert holds_the_least_share(reference, MANY)


def test_fifty_thousand_lengths_take_hardly_longer_than_five_hundred() -> None:
    def cpu_s(count: int) -> float:
        lengths, times_s = lmsys(count, 0), []
        for _ in range(3):
            began = time.process_time()
            refine_and_prune(lengths, STABLE)
            times_s.append(time.process_time() - began)
        return min(times_s)

    cpu_s(500)  # imports k-means

    assert cpu_s(MANY) < 5 * cpu_s(500)
