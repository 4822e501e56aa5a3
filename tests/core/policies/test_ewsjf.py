import math
from typing import Any

import pytest

from serve_app.core.events import Finished, FirstToken, PartitionChanged
from serve_app.core.policies import length_queues, make_policy
from serve_app.core.policies.ewsjf import density_weighted_score, queue_weights
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.core.settings import ScoreWeights
from serve_app.errors import Outcome
from tests.builders import ManualDriver, dispatched, one_replica, scheduled_request


def score(tokens: int, *, waited_s: float, queue_weight: float, prefill_s: float = 1.0) -> float:
    weights = queue_weights(ScoreWeights(), mean_tokens=float(tokens), queue_weight=queue_weight)
    return density_weighted_score(weights, tokens, waited_s, prefill_s)


def test_the_score_of_a_hand_worked_example() -> None:
    # b = 99, q = 4: 4/100 * (1 + (1e-4*99 + 1) * 2/0.5 + (-5e-5*99 + 0.5) * ln 100)
    expected = 0.04 * (1 + 1.0099 * 4 + 0.49505 * math.log(100))
    assert score(99, waited_s=2.0, queue_weight=4.0, prefill_s=0.5) == pytest.approx(expected, rel=1e-12)


def test_the_fairness_weight_is_clamped_for_long_queues() -> None:
    # a_f * b + b_f is negative from 10,000 tokens on.
    fresh = score(20_000, waited_s=0.0, queue_weight=1.0)
    assert fresh == pytest.approx((1 + 1e-3 * math.log(20_001)) / 20_001, rel=1e-9)


def partition(*bounds: tuple[int, int]) -> Partition:
    return Partition(
        tuple(
            LengthInterval(min_tokens=low, max_tokens=high, mean_tokens=(low + high) / 2, count=10)
            for low, high in bounds
        )
    )


def saturated(policy: str = "ewsjf", **changes: Any) -> ManualDriver:
    """Return one replica whose engine queue is full, so every arrival waits."""
    driver = one_replica(limits={"max_model_len": 8_000, "kv_tokens": 50_000}, policy=policy, **changes)
    for number in range(3):
        driver.arrive(f"f{number}", prompt_tokens=10)
    return driver


def in_order(driver: ManualDriver, count: int) -> list[str]:
    """Return the order of dispatch, with one request per round."""
    sent: list[str] = []
    running = ["f0", "f1", "f2"]
    while len(sent) < count:
        for request_id, _ in dispatched(driver.feed(Finished(running.pop(0), Outcome.COMPLETED))):
            sent.append(request_id)
            running.append(request_id)
    return sent


def test_short_heads_are_dispatched_first_while_none_has_waited() -> None:
    driver = saturated()
    for tokens in (900, 100, 40):
        driver.arrive(f"r{tokens}", prompt_tokens=tokens)
    assert in_order(driver, 3) == ["r40", "r100", "r900"]


FOUR_QUEUES = partition((1, 50), (51, 100), (101, 500), (501, 1_000))


def head_score(tokens: int, waited_s: float = 0.0) -> float:
    """Return the score of a head among `FOUR_QUEUES`."""
    policy = make_policy("ewsjf")
    policy.replace_partition(FOUR_QUEUES)
    head = scheduled_request(prompt_tokens=tokens)
    head.length_queue = policy.queue_of(head)
    return policy.score(head, waited_s)


@pytest.mark.parametrize(("waited_s", "first"), [(0.0, "short"), (0.14, "short"), (0.4, "longer")])
def test_a_shorter_queue_weighs_more_until_the_other_head_has_waited(waited_s: float, first: str) -> None:
    # Twice as long and 0.14 s old, the longer head would win in queues of equal weight: a value of 6.9 / 81
    # against 2.9 / 41. With 4 and 3 queues from the end it does not, but after 0.4 s it does.
    driver = saturated()
    driver.feed(PartitionChanged(FOUR_QUEUES))
    driver.arrive("longer", prompt_tokens=80)
    driver.now += waited_s
    driver.arrive("short", prompt_tokens=40)
    assert in_order(driver, 1) == [first]


def test_the_weights_of_two_queues_are_those_of_their_places() -> None:
    # Fresh heads: q / (b + 1) * (1 + w_fair * ln(b + 1)), w_fair of the mean length of the queue.
    for place, (tokens, mean) in enumerate(((40, 25.5), (80, 75.5), (400, 300.5), (900, 750.5))):
        value = 1 + (0.5 - 5e-5 * mean) * math.log(tokens + 1)
        assert head_score(tokens) == pytest.approx((4 - place) / (tokens + 1) * value), tokens


def test_a_new_partition_loses_no_request_and_preserves_arrival_order_in_a_queue() -> None:
    driver = saturated()
    for number in range(20):
        driver.arrive(f"r{number}", prompt_tokens=60 + number % 3, arrived_at=driver.now)
        driver.now += 0.001
    before = {scheduled.request.request_id for scheduled in driver.scheduler.queue}
    driver.feed(PartitionChanged(partition((1, 500))))
    assert {scheduled.request.request_id for scheduled in driver.scheduler.queue} == before
    assert {scheduled.length_queue for scheduled in driver.scheduler.queue} == {"1-500"}
    assert in_order(driver, 20) == [f"r{number}" for number in range(20)]


def test_a_length_in_a_gap_gets_a_bubble_that_is_removed_when_it_stays_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(length_queues, "_BUBBLE_ROUNDS", 3)
    driver = saturated()
    driver.feed(PartitionChanged(partition((1, 100), (2_000, 3_000))))
    driver.arrive("gap", prompt_tokens=1_000)
    (scheduled,) = driver.scheduler.queue
    assert scheduled.length_queue == "~951-1049"
    assert len(driver.scheduler.queue.policy.queue_bounds()) == 3
    assert dispatched(driver.feed(FirstToken("f0"))) == [("gap", "r1")]
    for number in range(6):
        driver.arrive(f"later{number}", prompt_tokens=50)
        driver.feed(FirstToken(f"later{number}"))
        if number < 3:
            driver.feed(FirstToken(f"f{number}"))
    assert len(driver.scheduler.queue.policy.queue_bounds()) == 2
