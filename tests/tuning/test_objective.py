"""The reward of an interval of traffic, from made-up records."""

import math
from typing import Any

import pytest

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import ClassTarget, ClassTargets
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.tuning.objective import ObjectiveSettings, reward_of
from tests.core.metrics.builders import record

TARGETS = ClassTargets(
    default=ClassTarget(ttft_s=1.0, long_ttft_s=10.0, tpot_s=0.1),
    batch=ClassTarget(ttft_s=60.0, long_ttft_s=300.0, tpot_s=None),
)
SLO = ObjectiveSettings(targets=TARGETS, min_requests=1)
PAPER = ObjectiveSettings(kind="paper", min_requests=1)


def served(ttft_s: float, *, tpot_s: float = 0.05, **changes: Any) -> RequestRecord:
    """Return a request that arrives at 0, has this TTFT, and then 11 tokens."""
    first = ttft_s
    fields = {"arrived_at": 0.0, "dispatched_at": 0.0, "first_token_at": first}
    return record(**{**fields, "finished_at": first + 10 * tpot_s, **changes})


def test_a_class_is_priority_and_size() -> None:
    long_batch = served(1.0, prompt_tokens=257, priority=PriorityClass.BATCH)
    assert TARGETS.class_of(long_batch) == "batch long"
    assert TARGETS.ttft_limit_s(long_batch) == 300.0
    short = served(1.0, prompt_tokens=256)
    assert TARGETS.class_of(short) == "default short"
    assert TARGETS.ttft_limit_s(short) == 1.0


def test_lateness_is_half_at_the_target_and_one_without_an_answer() -> None:
    assert TARGETS.lateness(served(0.0)) == 0.0
    assert TARGETS.lateness(served(1.0)) == 0.5
    assert TARGETS.lateness(served(3.0)) == 0.75
    assert TARGETS.lateness(served(3.0, outcome=Outcome.EXPIRED, first_token_at=None)) == 1.0


def test_the_slo_reward_by_hand() -> None:
    # Short: 0 s, 1 s and 3 s against 1 s, each ten times; long: 10 s against 10 s, and some that expired.
    gone = served(9.0, prompt_tokens=1_000, outcome=Outcome.EXPIRED, first_token_at=None, output_tokens=0)
    counted = [
        *(served(ttft_s, prompt_tokens=10) for ttft_s in (0.0, 1.0, 3.0) for _ in range(10)),
        *(served(10.0, prompt_tokens=1_000) for _ in range(10)),
        *[gone] * 10,
    ]
    found = reward_of(counted, SLO)
    assert found.terms["attainment"] == pytest.approx(3 / 5)
    # The worst class is the long one, half of which never got an answer.
    assert found.terms["tail"] == 1.0
    short, long = (0 + 0.5 + 0.75) / 3, (0.5 + 1) / 2
    assert found.terms["slowness"] == pytest.approx((short + long) / 2)
    # One tenant always has its fair share.
    assert found.terms["unfairness"] == 0.0
    assert found.value == pytest.approx(0.6 - 0.25 - 0.25 * (short + long) / 2)


def test_slow_decoding_is_out_of_the_slo_but_not_for_batch() -> None:
    slow = [served(0.1, tpot_s=0.2), served(0.1, tpot_s=0.2, priority=PriorityClass.BATCH)]
    assert reward_of(slow, SLO).terms["attainment"] == 0.5


def test_a_tenant_that_gets_nothing_costs_half() -> None:
    # Both request the same while the other arrives; one is served at once, the other after the last arrival.
    in_time = [served(0.0, tpot_s=0.0, tenant="a", request_id=f"a{n}") for n in range(2)]
    late = [served(5.0, tenant="b", request_id=f"b{n}") for n in range(2)]
    unfairness = reward_of([*in_time, *late], SLO).terms["unfairness"]
    assert unfairness == pytest.approx(0.5)


def test_small_classes_have_no_tail_of_their_own() -> None:
    counted = [served(0.0, prompt_tokens=10) for _ in range(20)]
    alone = reward_of([*counted, served(1e6, prompt_tokens=1_000)], SLO).terms
    assert alone["tail"] == 0.0


def test_the_terms_of_the_paper_by_hand() -> None:
    # Two queues: lengths 100 and 300 (variance 10,000) in one, 1,000 twice and 4,000 in the other.
    other_mean = 2_000
    other_variance = (2 * (1_000 - other_mean) ** 2 + (4_000 - other_mean) ** 2) / 3
    counted = [
        record(length_queue="q1", prompt_tokens=100, arrived_at=0.0, dispatched_at=2.0),
        record(length_queue="q1", prompt_tokens=300, arrived_at=0.0, dispatched_at=4.0),
        record(length_queue="q2", prompt_tokens=1_000, arrived_at=0.0, dispatched_at=0.0),
        record(length_queue="q2", prompt_tokens=1_000, arrived_at=0.0, dispatched_at=0.0),
        record(length_queue="q2", prompt_tokens=4_000, arrived_at=0.0, dispatched_at=9.0),
    ]
    found = reward_of(counted, PAPER)
    terms = found.terms
    inside = (2 * 10_000 + 3 * other_variance) / 5
    assert terms["compactness"] == pytest.approx(1 / (1 + inside / 1e6))
    # Sizes 2 and 3: mean 2.5, deviation 0.5.
    assert terms["balance"] == pytest.approx(1 / 1.2)
    assert terms["proliferation"] == pytest.approx(2 / 32)
    # 15 s over 5 requests, over 10 s.
    assert terms["latency"] == pytest.approx(0.3)
    expected = terms["compactness"] + terms["balance"] - 0.5 / 16 - 0.3
    assert found.value == pytest.approx(expected)


def test_without_the_names_of_queues_the_objective_of_the_paper_has_no_reward() -> None:
    found = reward_of([served(0.1, length_queue=""), served(0.1, length_queue="")], PAPER)
    assert found.value is None
    assert "length queue" in found.reason


def test_a_request_never_dispatched_waited_to_its_end() -> None:
    gone = served(
        0.0,
        dispatched_at=None,
        first_token_at=None,
        finished_at=20.0,
        length_queue="",
        outcome=Outcome.EXPIRED,
    )
    terms = reward_of([gone, served(0.0, length_queue="q")], PAPER).terms
    assert terms["latency"] == pytest.approx(1.0)
    assert terms["proliferation"] == 1 / 32


def test_too_few_requests_give_no_reward() -> None:
    found = reward_of([served(0.1)] * 29, ObjectiveSettings())
    assert found.value is None
    assert found.reason == "29 requests can be evaluated, 30 are needed"
    assert reward_of([served(0.1)] * 30, ObjectiveSettings()).value is not None


@pytest.mark.parametrize(
    ("changes", "judged", "attainment"),
    [
        pytest.param({"outcome": Outcome.REJECTED_INVALID}, 1, 1.0, id="invalid"),
        pytest.param({"outcome": Outcome.REJECTED_TOO_LONG}, 1, 1.0, id="too long"),
        pytest.param({"outcome": Outcome.REJECTED_RATE_LIMITED}, 1, 1.0, id="beyond its rate limit"),
        pytest.param({"outcome": Outcome.CANCELLED, "finished_at": 0.5}, 1, 1.0, id="left at once"),
        pytest.param({"outcome": Outcome.CANCELLED, "finished_at": 5.0}, 2, 0.5, id="left in vain"),
        pytest.param({"outcome": Outcome.REJECTED_QUEUE_FULL, "finished_at": 0.0}, 2, 0.5, id="full queue"),
        pytest.param({}, 1, 1.0, id="answered, but not streamed"),
    ],
)
def test_a_request_without_a_first_token_is_judged_if_its_scheduling_decided_that(
    changes: dict[str, Any], judged: int, attainment: float
) -> None:
    found = reward_of([served(0.1), served(0.0, first_token_at=None, **changes)], SLO)
    assert (found.requests, found.terms["attainment"]) == (judged, attainment)


def test_when_most_first_tokens_are_missing_there_is_no_reward() -> None:
    found = reward_of([served(0.1), *[served(0.1, first_token_at=None)] * 3], SLO)
    assert found.value is None
    assert "25%" in found.reason


def test_a_reward_that_is_not_finite_is_none() -> None:
    found = reward_of([served(math.inf, length_queue="q", dispatched_at=math.inf)], PAPER)
    assert found.value is None
