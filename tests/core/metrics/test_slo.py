from functools import partial

import pytest

from serve_app.core.metrics.summary import ClassTarget, ClassTargets, Miss, Slo, slo_attainment_ratio
from serve_app.errors import Outcome
from tests.core.metrics.builders import record


def test_a_request_must_meet_every_limit() -> None:
    assert Slo(ttft_s=2.0, tpot_s=0.11, e2e_s=3.0).met_by(record())
    assert not Slo(ttft_s=1.9, tpot_s=0.11).met_by(record())
    assert not Slo(ttft_s=2.0, tpot_s=0.09).met_by(record())
    assert not Slo(ttft_s=None, tpot_s=None, e2e_s=2.9).met_by(record())


def test_a_fast_failure_meets_no_slo() -> None:
    assert not Slo(ttft_s=None, tpot_s=None).met_by(record(outcome=Outcome.FAILED))


def test_a_one_token_answer_is_judged_by_its_ttft_alone() -> None:
    assert Slo(ttft_s=2.0, tpot_s=0.001).met_by(record(output_tokens=1))


def test_attainment_counts_rejected_requests_as_missed() -> None:
    records = [record(), record(outcome=Outcome.REJECTED_QUEUE_FULL)]
    assert slo_attainment_ratio(records, Slo(tpot_s=1.0)) == 0.5
    assert slo_attainment_ratio([], Slo()) is None


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_nothing_can_meet_is_rejected_by_name_and_value(limit: float) -> None:
    with pytest.raises(ValueError, match=rf"ttft_s must be positive, got {limit}"):
        Slo(ttft_s=limit)


TARGETS = ClassTargets(default=ClassTarget(ttft_s=1.0, long_ttft_s=10.0, tpot_s=0.1))


class_record = partial(
    record, arrived_at=0.0, first_token_at=0.5, finished_at=1.4, prompt_tokens=10, output_tokens=10
)


def test_a_request_may_miss_both_latencies() -> None:
    assert TARGETS.missed_by(class_record()) == ()
    assert TARGETS.missed_by(class_record(first_token_at=1.1, finished_at=1.5)) == (Miss.TTFT,)
    assert TARGETS.missed_by(class_record(finished_at=2.0)) == (Miss.TPOT,)
    assert TARGETS.missed_by(class_record(first_token_at=2.0, finished_at=9.0)) == (Miss.TTFT, Miss.TPOT)
    # A long prompt has a longer limit, and an answer in one piece has neither latency.
    assert TARGETS.missed_by(class_record(first_token_at=2.0, finished_at=2.5, prompt_tokens=9_999)) == ()
    assert TARGETS.missed_by(class_record(first_token_at=None, finished_at=60.0)) == ()


def test_an_unanswered_request_misses_by_its_outcome() -> None:
    kinds = {
        Outcome.EXPIRED: Miss.EXPIRED,
        Outcome.FAILED: Miss.FAILED,
        Outcome.CANCELLED: Miss.ABANDONED,
        Outcome.REJECTED_QUEUE_FULL: Miss.REJECTED,
        Outcome.REJECTED_NO_REPLICA: Miss.REJECTED,
    }
    for outcome, kind in kinds.items():
        assert TARGETS.missed_by(class_record(outcome=outcome)) == (kind,)


def test_outcomes_that_no_scheduling_could_change_are_not_attributable() -> None:
    for outcome in (Outcome.REJECTED_INVALID, Outcome.REJECTED_UNKNOWN_RESPONSE):
        assert not TARGETS.is_attributable(class_record(outcome=outcome))
    assert not TARGETS.is_attributable(
        class_record(outcome=Outcome.CANCELLED, first_token_at=None, finished_at=0.9)
    )
    assert TARGETS.is_attributable(
        class_record(outcome=Outcome.CANCELLED, first_token_at=None, finished_at=1.1)
    )
    assert TARGETS.is_attributable(class_record(outcome=Outcome.EXPIRED))
