from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimator
from serve_app.core.routing.pools import ArrivedWork
from serve_app.request import PriorityClass
from tests.builders import request

ESTIMATOR = TokenEstimator(EstimatorSettings())


def test_work_is_counted_at_home_without_what_is_cached_and_without_batch() -> None:
    arrived = ArrivedWork(("short", "long"))
    one = request(prompt_tokens=100, max_output_tokens=7)
    estimate = ESTIMATOR.estimate(one)
    arrived.add(("short", "long"), one, estimate, cached_tokens=60)
    arrived.add(("short",), request(priority=PriorityClass.BATCH), estimate)
    arrived.add((), one, estimate)
    counted = arrived["short"]
    assert (counted.requests, counted.prefill_tokens) == (1, 40)
    assert counted.output_tokens == estimate.expected_output_tokens
    assert arrived["long"].requests == 0
