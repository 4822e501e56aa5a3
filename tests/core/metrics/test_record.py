import pytest

from serve_app.errors import Outcome
from tests.core.metrics.builders import record


def test_latencies_follow_from_the_timestamps() -> None:
    served = record()
    assert served.queue_wait_s == 1.0
    assert served.ttft_s == 2.0
    assert served.tpot_s == pytest.approx(0.1)
    assert served.e2e_s == 3.0
    assert served.completed


def test_ttft_counts_from_the_schedule_and_not_from_a_late_send() -> None:
    late = record(sent_at=11.5)
    assert late.ttft_s == 2.0
    assert late.schedule_lag_s == 1.5


def test_a_request_that_no_engine_answered_has_no_ttft_tpot_or_queue_wait() -> None:
    rejected = record(
        outcome=Outcome.REJECTED_QUEUE_FULL, dispatched_at=None, first_token_at=None, output_tokens=0
    )
    assert (rejected.ttft_s, rejected.tpot_s, rejected.queue_wait_s) == (None, None, None)
    assert not rejected.completed


def test_one_token_has_no_time_per_further_token() -> None:
    assert record(output_tokens=1).tpot_s is None
