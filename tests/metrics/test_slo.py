import pytest

from serve_app.errors import Outcome
from serve_app.metrics.slo import Slo, slo_attainment_ratio
from tests.metrics.builders import record


def test_a_request_must_keep_every_limit() -> None:
    assert Slo(ttft_s=2.0, tpot_s=0.11, e2e_s=3.0).met_by(record())
    assert not Slo(ttft_s=1.9, tpot_s=0.11).met_by(record())
    assert not Slo(ttft_s=2.0, tpot_s=0.09).met_by(record())
    assert not Slo(ttft_s=None, tpot_s=None, e2e_s=2.9).met_by(record())


def test_a_fast_failure_meets_no_slo() -> None:
    assert not Slo(ttft_s=None, tpot_s=None).met_by(record(outcome=Outcome.FAILED))


def test_a_one_token_answer_is_judged_by_its_ttft_alone() -> None:
    assert Slo(ttft_s=2.0, tpot_s=0.001).met_by(record(output_tokens=1))


def test_attainment_counts_refused_requests_as_missed() -> None:
    records = [record(), record(outcome=Outcome.REJECTED_QUEUE_FULL)]
    assert slo_attainment_ratio(records, Slo(tpot_s=1.0)) == 0.5
    assert slo_attainment_ratio([], Slo()) is None


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_nothing_can_keep_is_refused_by_name_and_value(limit: float) -> None:
    with pytest.raises(ValueError, match=rf"ttft_s must be positive, got {limit}"):
        Slo(ttft_s=limit)
