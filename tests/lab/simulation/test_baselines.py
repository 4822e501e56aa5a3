from serve_app.core.events import PartitionChanged
from tests.builders import dispatched
from tests.core.policies.test_ewsjf import FOUR_QUEUES, head_score, in_order, partition, saturated


def test_short_heads_are_dispatched_first_while_none_has_waited() -> None:
    driver = saturated("ewsjf-paper")
    for tokens in (900, 100, 40):
        driver.arrive(f"r{tokens}", prompt_tokens=tokens)
    assert in_order(driver, 3) == ["r40", "r100", "r900"]


def test_a_round_fills_from_the_best_queue_and_then_its_neighbours() -> None:
    driver = saturated("ewsjf-paper")
    driver.feed(PartitionChanged(partition((1, 50), (51, 100), (101, 500))))
    for name, tokens in (("c", 200), ("b", 80), ("a1", 40), ("a2", 45)):
        driver.arrive(name, prompt_tokens=tokens)
    # All three starts are in one report, so one round dispatches three.
    sent = dispatched(driver.report("r1", received=3, running=3, after_s=0.2))
    assert [request_id for request_id, _ in sent] == ["a1", "a2", "b"]


def test_a_round_fills_from_near_queues_before_a_far_one_with_a_higher_score() -> None:
    driver = saturated("ewsjf-paper")
    driver.feed(PartitionChanged(FOUR_QUEUES))
    driver.arrive("far", prompt_tokens=900)
    driver.now += 20.0
    driver.arrive("best", prompt_tokens=40)
    driver.arrive("near", prompt_tokens=80)
    assert head_score(40) > head_score(900, waited_s=20.0) > head_score(80), "by score alone, far is second"
    # All three starts are in one report, so one round dispatches three.
    sent = dispatched(driver.report("r1", received=3, running=3, after_s=0.01))
    assert tuple(request_id for request_id, _ in sent) == ("best", "near", "far")
