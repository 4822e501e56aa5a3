"""A request inside the scheduler."""

from dataclasses import replace

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimator
from tests.builders import request


def test_the_tokens_to_prefill_follow_the_estimate_and_the_cached_tokens() -> None:
    asked = request("r1", prompt_tokens=100)
    estimate = TokenEstimator(EstimatorSettings()).estimate(asked)
    scheduled = ScheduledRequest(asked, estimate, 1, ("short",), cached_tokens=30)
    assert scheduled.prefill_tokens == 70
    scheduled.expect_cached(100)
    assert scheduled.prefill_tokens == 1
    scheduled.expect(replace(estimate, expected_prompt_tokens=140))
    assert (scheduled.cached_tokens, scheduled.prefill_tokens) == (100, 40)
