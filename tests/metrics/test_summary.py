import json

import pytest

from serve_app.errors import Outcome
from serve_app.metrics.slo import Slo
from serve_app.metrics.summary import SummaryRules, summarise
from tests.metrics.builders import record

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
    assert summarise([record()], preemptions_known=False).preemptions is None


def test_a_run_in_which_nothing_completed_has_rates_of_zero_and_no_latencies() -> None:
    summary = summarise([record(outcome=Outcome.EXPIRED)])
    assert (summary.completed, summary.makespan_s, summary.throughput_tokens_per_s) == (0, 0.0, 0.0)
    assert summary.ttft_s.all.mean is None
    assert summarise([]).as_json()["completed"] == 0


def test_rules_that_make_no_sense_are_refused_with_their_value() -> None:
    with pytest.raises(ValueError, match="short_at_tokens must be at least 1, got 0"):
        SummaryRules(short_at_tokens=0)
    with pytest.raises(ValueError, match="'a' must be positive, got 0"):
        SummaryRules(weights={"a": 0})
