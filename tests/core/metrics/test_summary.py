"""Summaries of request records, SLO attainment, and confidence intervals."""

import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import (
    ClassTarget,
    ClassTargets,
    Distribution,
    Miss,
    Slo,
    SummaryRules,
    interval_95,
    jain_index,
    jain_of_tenants,
    max_min_shares,
    percentile,
    slo_attainment_ratio,
    summarise,
    t_95,
    tokens_served,
)
from serve_app.errors import Outcome
from tests.core.metrics.builders import record

SIZES = {"all", "short", "long"}
FIGURES = {"mean", "p50", "p95", "p99", "max"}


def test_the_json_has_exactly_the_names_of_the_contract() -> None:
    metrics = summarise([record()]).as_json()
    latencies = {"ttft_s", "tpot_s", "e2e_s", "queue_wait_s"}
    others = {
        "completed",
        "throughput_tokens_per_s",
        "goodput_per_s",
        "makespan_s",
        "preemptions",
        "jain_tenants",
        "tenants",
    }
    assert set(metrics) == latencies | others
    for name in latencies:
        by_size = metrics[name]
        assert isinstance(by_size, dict)
        assert set(by_size) == SIZES
        assert all(set(figures) == FIGURES for figures in by_size.values())
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_figures_of_a_small_run_can_be_checked_by_hand() -> None:
    records = [
        record(arrived_at=0.0, dispatched_at=0.0, first_token_at=1.0, finished_at=2.0, preemptions=2),
        record(arrived_at=5.0, dispatched_at=7.0, first_token_at=8.0, finished_at=10.0, prompt_tokens=1000),
        record(
            arrived_at=5.0, first_token_at=None, outcome=Outcome.FAILED, finished_at=20.0, output_tokens=0
        ),
    ]
    summary = summarise(records, SummaryRules(slo=Slo(ttft_s=2.0, tpot_s=None)))
    assert summary.completed == 2
    assert summary.makespan_s == 10.0
    assert summary.throughput_tokens_per_s == pytest.approx((100 + 11 + 1000 + 11) / 10)
    assert summary.output_tokens_per_s == pytest.approx(2.2)
    assert summary.goodput_per_s == pytest.approx(0.1)
    assert summary.preemptions == 2
    assert summary.ttft_s.all.mean == 2.0
    assert (summary.ttft_s.short.max, summary.ttft_s.long.max) == (1.0, 3.0)
    assert summary.queue_wait_s.all.mean == 1.0
    assert summary.outcomes == {"completed": 2, "failed": 1}


def test_each_tenant_has_its_figures_and_the_busiest_are_named() -> None:
    records = [
        record(tenant="a", arrived_at=0.0, first_token_at=1.0, finished_at=2.0),
        record(tenant="a", arrived_at=0.0, first_token_at=3.0, finished_at=4.0),
        record(tenant="b", outcome=Outcome.EXPIRED),
    ]
    tenants = summarise(records).as_json()["tenants"]
    assert tenants == {
        "a": {"requests": 2, "ttft_s": {"mean": 2.0, "p99": 2.98, "max": 3.0}, "service_tokens": 2 * 111},
        "b": {"requests": 1, "ttft_s": {"mean": None, "p99": None, "max": None}, "service_tokens": 0},
    }
    many = [record(tenant=f"t{number}") for number in range(150)] + [record(tenant="t149")]
    named = summarise(many).tenants
    assert len(named) == 100
    assert named["t149"].requests == 2


def test_a_prompt_of_exactly_the_short_limit_is_short() -> None:
    records = [record(prompt_tokens=300), record(prompt_tokens=301)]
    summary = summarise(records, SummaryRules(short_at_tokens=300))
    assert (summary.ttft_s.short.max, summary.ttft_s.long.max) == (2.0, 2.0)
    assert summarise(records).ttft_s.short.max is None


def test_an_observer_that_does_not_see_engines_reports_no_preemptions() -> None:
    assert summarise([record()], has_preemptions=False).preemptions is None


def test_a_run_in_which_nothing_completed_has_rates_of_zero_and_no_latencies() -> None:
    summary = summarise([record(outcome=Outcome.EXPIRED)])
    assert (summary.completed, summary.makespan_s, summary.throughput_tokens_per_s) == (0, 0.0, 0.0)
    assert summary.ttft_s.all.mean is None
    assert summarise([]).as_json()["completed"] == 0


def test_invalid_rules_are_rejected_with_their_value() -> None:
    with pytest.raises(ValueError, match="short_at_tokens must be at least 1, got 0"):
        SummaryRules(short_at_tokens=0)
    with pytest.raises(ValueError, match="'a' must be positive, got 0"):
        SummaryRules(weights={"a": 0})


finite = st.floats(min_value=-1e9, max_value=1e9)


@given(st.lists(finite, min_size=1), st.floats(min_value=0, max_value=100))
def test_percentiles_agree_with_numpy(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_distribution_does_not_depend_on_the_order_of_the_sample() -> None:
    figures = Distribution.of([3.0, 1.0, 2.0]).as_json()
    assert figures == pytest.approx({"mean": 2.0, "p50": 2.0, "p95": 2.9, "p99": 2.98, "max": 3.0})


def test_an_empty_sample_has_no_figures_rather_than_zeros() -> None:
    assert Distribution.of([]).as_json() == {"mean": None, "p50": None, "p95": None, "p99": None, "max": None}
    with pytest.raises(ValueError, match="empty sample"):
        percentile([], 50)


def test_a_percent_out_of_range_is_rejected() -> None:
    with pytest.raises(ValueError, match="got 101"):
        percentile([1.0], 101)


def served_late(tenant: str) -> RequestRecord:
    return record(tenant=tenant, arrived_at=0.0, dispatched_at=90, first_token_at=100.0, finished_at=110.0)


def served_at_once(tenant: str) -> RequestRecord:
    return record(tenant=tenant, arrived_at=0.0, dispatched_at=0.0, first_token_at=0.5, finished_at=1.0)


def last_arrival(tenant: str) -> RequestRecord:
    """Build an arrival that ends the measured span."""
    return record(tenant=tenant, arrived_at=50.0, prompt_tokens=0, output_tokens=0, finished_at=50.0)


def test_jain_is_one_when_all_are_equal_and_one_nth_when_one_has_all() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([0.0]) is None
    assert jain_index([]) is None


@given(st.lists(st.floats(min_value=0.001, max_value=1e6), min_size=1))
def test_jain_lies_between_one_nth_and_one(values: list[float]) -> None:
    index = jain_index(values)
    assert index is not None
    assert 1 / len(values) - 1e-9 <= index <= 1 + 1e-9


@given(
    st.dictionaries(st.text(max_size=3), st.floats(min_value=0, max_value=1e6), min_size=1),
    st.floats(min_value=0, max_value=1e6),
)
def test_shares_never_exceed_the_demand_and_use_all_usable_capacity(
    asked: dict[str, float], capacity: float
) -> None:
    shares = max_min_shares(asked, capacity, {})
    assert all(shares[tenant] <= asked[tenant] + 1e-6 for tenant in asked)
    assert sum(shares.values()) == pytest.approx(min(capacity, sum(asked.values())), abs=1e-6)


def test_the_unused_share_of_a_modest_tenant_is_divided_by_weight() -> None:
    shares = max_min_shares({"small": 10.0, "a": 100.0, "b": 100.0}, 100.0, {"b": 2.0})
    assert shares == pytest.approx({"small": 10.0, "a": 30.0, "b": 60.0})


def test_tenants_whose_different_demands_were_met_are_equally_served() -> None:
    records = [served_at_once("heavy") for _ in range(9)] + [served_at_once("light"), last_arrival("light")]
    assert jain_of_tenants(records) == pytest.approx(1.0)


def test_a_tenant_that_waits_while_another_is_served_lowers_the_index() -> None:
    records = [served_at_once("favoured") for _ in range(4)] + [served_late("starved") for _ in range(4)]
    index = jain_of_tenants([*records, last_arrival("favoured")])
    assert index == pytest.approx(0.5)


def test_one_tenant_alone_is_fairly_served() -> None:
    assert jain_of_tenants([served_at_once("only"), last_arrival("only")]) == pytest.approx(1.0)


def test_without_service_there_is_no_index() -> None:
    assert jain_of_tenants([]) is None
    assert jain_of_tenants([record(outcome=Outcome.FAILED, first_token_at=None, output_tokens=0)]) is None


def test_service_is_counted_as_the_engine_processes_it() -> None:
    streamed = record(first_token_at=10.0, finished_at=20.0, prompt_tokens=100, output_tokens=10)
    assert tokens_served(streamed, until=9.9) == 0
    assert tokens_served(streamed, until=10.0) == 100
    assert tokens_served(streamed, until=15.0) == pytest.approx(105)
    assert tokens_served(streamed, until=20.0) == 110
    whole = record(first_token_at=None, finished_at=20.0)
    assert tokens_served(whole, until=19.9) == 0
    assert tokens_served(whole, until=20.0) == 111


# -- SLO attainment ---------------------------------------------------------------------------------------


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


# -- confidence intervals ---------------------------------------------------------------------------------


def test_the_interval_of_a_known_sample() -> None:
    interval = interval_95([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval.mean == 3.0
    # Standard deviation sqrt(2.5), n 5, t(4) = 2.776: half width 1.963.
    assert interval.low == pytest.approx(1.037, abs=1e-3)
    assert interval.high == pytest.approx(4.963, abs=1e-3)


def test_one_seed_gives_a_mean_without_bounds() -> None:
    interval = interval_95([7.0])
    assert interval.as_json() == {"mean": 7.0, "low": None, "high": None, "n": 1}


def test_no_runs_have_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        interval_95([])


def test_t_falls_with_the_degrees_of_freedom_towards_the_normal() -> None:
    points = [t_95(n) for n in range(1, 200)]
    assert points == sorted(points, reverse=True)
    assert t_95(60) == pytest.approx(2.000, abs=1e-3)
    assert t_95(10**6) == pytest.approx(1.960, abs=1e-3)
