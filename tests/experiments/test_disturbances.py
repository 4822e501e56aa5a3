import math
from random import Random

import pytest

from experiments.policies.disturbances import LengthNoise, with_flipped_mix
from serve_app.lab.simulation.run import simulate
from serve_app.lab.workloads import TraceError
from tests.lab.simulation.test_run import TRACE, rng, settings


def test_noise_changes_what_the_scheduler_sees_and_nothing_that_engines_do() -> None:
    exact, noisy = (
        simulate(settings("fcfs", estimator=LengthNoise(relative_error=error))) for error in (0.0, 0.5)
    )
    true_lengths = [record.prompt_tokens for record in exact.records]
    assert [record.prompt_tokens for record in noisy.records] == true_lengths
    assert noisy.whole.completed == 300
    ratios = sorted(
        (mistaken.estimated_tokens or 0) / (right.estimated_tokens or 1)
        for mistaken, right in zip(noisy.records, exact.records, strict=True)
    )
    assert ratios[0] < 0.95
    assert ratios[-1] > 1.05


def test_noise_is_log_normal_around_the_truth() -> None:
    factors = LengthNoise(relative_error=0.3).factors(map(str, range(4_000)), Random(1))
    logs = [math.log(factor) for factor in factors.values()]
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in logs) / len(logs))
    assert mean == pytest.approx(0.0, abs=0.02)
    assert deviation == pytest.approx(0.3, rel=0.05)


def test_a_flipped_mix_exchanges_shares_after_the_middle() -> None:
    flipped = with_flipped_mix(TRACE, 256, rng())
    halves = flipped.requests[:2_000], flipped.requests[2_000:]
    shares = [sum(one.prompt_tokens > 256 for one in half) / 2_000 for half in halves]
    assert shares == pytest.approx([0.2, 0.8], abs=0.03)
    assert halves[0] == TRACE.requests[:2_000]
    assert [one.arrival_s for one in flipped.requests] == [one.arrival_s for one in TRACE.requests]


def test_a_trace_of_one_kind_has_no_mix_to_flip() -> None:
    with pytest.raises(TraceError, match="cannot flip the mix"):
        with_flipped_mix(TRACE, 10, rng())
