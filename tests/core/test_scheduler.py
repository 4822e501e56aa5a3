"""The scheduler by events and commands: routing, dispatch, rejections and time."""

import pytest

from serve_app.core.commands import Conclude, Dispatch, ReportFresh, ReportStale
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import Finished, FirstToken, Woke
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PromptShape, Usage
from tests.builders import (
    ManualDriver,
    concluded,
    dispatched,
    fill,
    one_replica,
    only_conclusion,
    request,
    retry_after_s,
    two_pools,
)

LONG = {"prompt_tokens": 2_000}


def test_a_request_that_fits_is_dispatched_immediately() -> None:
    (command,) = two_pools().arrive("r1", prompt_tokens=40, max_output_tokens=10)
    assert command == Dispatch(
        request_id="r1",
        gateway_id="g1",
        replica_id="s1",
        pool="short",
        length_queue="all",
        estimated_tokens=50,
        queue_wait_s=0.0,
    )


def test_a_short_request_spills_when_its_pool_has_no_capacity_and_a_long_one_spills_back() -> None:
    driver = two_pools()
    fill(driver)
    assert dispatched(driver.arrive("spilled")) == [("spilled", "l1")]
    other = two_pools()
    sent = [dispatched(other.arrive(f"r{n}", prompt_tokens=600))[0][1] for n in range(4)]
    assert sent == ["l1", "l1", "l1", "s1"]


def test_requests_at_home_are_dispatched_before_those_that_spill() -> None:
    driver = two_pools()
    fill(driver)
    fill(driver, "long", **LONG)
    assert driver.arrive("short") == []
    assert driver.arrive("long", **LONG) == []
    assert dispatched(driver.feed(FirstToken("long0"))) == [("long", "l1")]
    assert dispatched(driver.feed(FirstToken("long1"))) == [("short", "l1")]


def three_pools() -> ManualDriver:
    """Return one replica in each pool: `s1`, `m1` and `l1`."""
    routing = RoutingSettings(pools=("short", "mid", "long"), b_short_tokens=500)
    driver = ManualDriver(routing=routing)
    driver.join("s1", "short", max_model_len=1_000)
    driver.join("m1", "mid", max_model_len=2_000)
    driver.join("l1", "long", max_model_len=4_000, kv_tokens=16_000)
    return driver


def test_a_request_spills_into_the_next_pool_before_any_further_one() -> None:
    driver = three_pools()
    # At home in the middle pool, and small enough for the short one.
    middling = {"prompt_tokens": 600, "max_output_tokens": 10}
    sent = [name for n in range(9) for name in dispatched(driver.arrive(f"r{n}", **middling))]
    assert [replica for _, replica in sent] == ["m1"] * 3 + ["l1"] * 3 + ["s1"] * 3


def test_a_pool_serves_home_requests_then_spills_by_preference() -> None:
    driver = three_pools()
    for number in range(9):
        driver.arrive(f"f{number}", prompt_tokens=10, max_output_tokens=10)
    assert driver.arrive("small", prompt_tokens=10, max_output_tokens=10) == []
    assert driver.arrive("middling", prompt_tokens=1_500, max_output_tokens=10) == []
    assert driver.arrive("large", prompt_tokens=3_000, max_output_tokens=10) == []
    on_long = [request_id for request_id, replica_id in _replica_of(driver) if replica_id == "l1"]
    order = [name for request_id in on_long for name, _ in dispatched(driver.feed(FirstToken(request_id)))]
    assert order == ["large", "middling", "small"]


def _replica_of(driver: ManualDriver) -> list[tuple[str, str | None]]:
    return [(f"f{number}", driver.find(f"f{number}").replica_id) for number in range(9)]


def test_a_dispatch_holds_expected_tokens_and_its_end_returns_them() -> None:
    driver = two_pools()
    driver.arrive("r1", prompt_tokens=40, max_output_tokens=10)
    assert 40 < driver.scheduler.ledger["s1"].held_tokens <= 50
    commands = driver.feed(Finished("r1", Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=10)))
    assert commands == [
        Conclude(request_id="r1", gateway_id="g1", conclusion=Conclusion(Outcome.COMPLETED), dispatched=True)
    ]
    state = driver.scheduler.ledger["s1"]
    assert (state.held_tokens, state.in_flight, state.unstarted, state.unseen) == (0, 0, 0, 0)
    assert len(driver.scheduler) == 0


def test_the_engine_queue_stays_at_its_target() -> None:
    driver = one_replica("s1")
    assert [len(driver.arrive(f"r{n}")) for n in range(5)] == [1, 1, 1, 0, 0]
    # The engine has all three in its batch, so three more may be dispatched.
    reported = driver.report(received=3, waiting=0, running=3, after_s=0.2)
    assert dispatched(reported) == [("r3", "s1"), ("r4", "s1")]


def test_in_transit_requests_count_before_a_report_includes_them() -> None:
    driver = one_replica("s1")
    for number in range(4):
        driver.arrive(f"r{number}")
    # Only one of the three has reached the engine when it reports, and it waits there.
    assert dispatched(driver.report(received=1, waiting=1, after_s=0.2)) == []
    assert dispatched(driver.report(received=2, waiting=1, after_s=0.2)) == [("r3", "s1")]


def test_the_batch_size_limits_what_a_replica_runs() -> None:
    driver = one_replica("s1", limits={"max_num_seqs": 2})
    for number in range(8):
        driver.arrive(f"r{number}")
        driver.feed(FirstToken(f"r{number}"))
    assert driver.scheduler.ledger["s1"].in_flight == 2 + 3


def test_a_head_that_does_not_fit_the_kv_budget_blocks_its_sub_queue() -> None:
    driver = one_replica("s1", limits={"max_model_len": 1_000, "kv_tokens": 1_500})
    driver.arrive("big", prompt_tokens=900, max_output_tokens=50)
    assert driver.arrive("big2", prompt_tokens=900, max_output_tokens=50) == []
    assert driver.arrive("small", prompt_tokens=10) == []
    assert dispatched(driver.feed(Finished("big", Outcome.COMPLETED))) == [("big2", "s1"), ("small", "s1")]


def test_a_request_too_long_for_every_pool_is_rejected_with_its_limit_and_size() -> None:
    rejection = only_conclusion(two_pools().arrive("r", prompt_tokens=4_000, max_output_tokens=1))
    assert (rejection.outcome, rejection.retry_after_s) == (Outcome.REJECTED_TOO_LONG, None)
    assert "maximum context length is 4000 tokens. " in rejection.message
    assert "estimated at 4,000 tokens, and the requested output is 1" in rejection.message
    assert "needs 4,001." in rejection.message


def test_retry_after_follows_the_measured_drain_rate() -> None:
    def retry_after_s_at(finished_per_s: float) -> float:
        # Without growth by pace, three requests fill the replica at any pace.
        driver = one_replica("s1", max_waiting=1, backpressure=BackpressureSettings(lag_factor=0.0))
        fill(driver)
        driver.arrive("r0")
        running = ["f0", "f1", "f2"]
        for number in range(1, 40):
            driver.feed(Finished(running.pop(0), Outcome.COMPLETED), after_s=1 / finished_per_s)
            driver.report(received=number + 2, waiting=3)
            running.append(f"r{number - 1}")
            driver.arrive(f"r{number}")
        rejected = driver.arrive("one too many")
        assert concluded(rejected) == [("one too many", "rejected_queue_full")]
        return retry_after_s(rejected)

    assert retry_after_s_at(0.5) == pytest.approx(10 * retry_after_s_at(5.0), rel=0.4)


def test_an_unknown_model_is_rejected_by_name() -> None:
    rejection = only_conclusion(two_pools().arrive("r", model="other"))
    assert rejection.outcome is Outcome.REJECTED_UNKNOWN_MODEL
    assert "other" in rejection.message


def test_an_alias_is_served() -> None:
    driver = one_replica("s1", aliases=("m-lora",))
    assert dispatched(driver.arrive("r", model="m-lora")) == [("r", "s1")]


def test_expiry_precedes_dispatch_at_the_same_time() -> None:
    driver = two_pools()
    fill(driver)
    fill(driver, "long", **LONG)
    driver.arrive("w", expires_at=2.0)
    commands = driver.feed(FirstToken("f0"), after_s=2.0)
    assert concluded(commands) == [("w", "expired")]
    assert dispatched(commands) == []


def test_a_no_wait_request_is_dispatched_or_rejected_immediately() -> None:
    driver = two_pools()
    assert dispatched(driver.arrive("a", no_wait=True, **LONG)) == [("a", "l1")]
    driver.arrive("b", **LONG)
    driver.arrive("c", **LONG)
    rejection = only_conclusion(driver.arrive("d", no_wait=True, **LONG))
    assert rejection.outcome is Outcome.REJECTED_QUEUE_FULL
    assert "x-queue: no-wait" in rejection.message


def test_a_stale_report_closes_the_replica_until_the_next_report() -> None:
    driver = one_replica("s1", backpressure=BackpressureSettings(report_limit_s=2.0))
    assert driver.scheduler.next_wakeup() == 2.0
    assert driver.feed(Woke(), after_s=2.0) == [ReportStale(replica_id="s1", age_s=2.0)]
    assert driver.arrive("r") == []
    commands = driver.report(after_s=1.0)
    assert commands[0] == ReportFresh(replica_id="s1")
    assert dispatched(commands) == [("r", "s1")]


def test_without_any_replica_requests_wait_and_are_rejected_after_the_grace() -> None:
    driver = ManualDriver(no_replica_grace_s=10.0)
    assert driver.arrive("r") == []
    assert driver.scheduler.next_wakeup() == 10.0
    assert driver.feed(Woke(), after_s=9.9) == []
    commands = driver.feed(Woke(), after_s=0.1)
    assert concluded(commands) == [("r", "rejected_no_replica")]
    assert "m has had no live replica for 10.0 s" in only_conclusion(commands).message
    assert concluded(driver.arrive("late")) == [("late", "rejected_no_replica")]
    driver.join("s1", "short")
    assert dispatched(driver.arrive("later")) == [("later", "s1")]


def test_a_decreasing_time_is_rejected() -> None:
    driver = two_pools()
    driver.feed(Woke(), after_s=1.0)
    with pytest.raises(ValueError, match=r"time decreased from 1\.0 to 0\.5"):
        driver.scheduler.handle(Woke(), 0.5)


def test_a_server_that_counts_no_prompt_tokens_teaches_nothing() -> None:
    driver = ManualDriver()
    driver.join("s1")
    driver.report("s1")
    text = PromptShape(text_bytes=4_000)
    before = driver.scheduler.estimator.estimate(request("x", shape=text)).expected_prompt_tokens
    for number in range(30):
        driver.arrive(f"r{number}", shape=text)
        driver.feed(Finished(f"r{number}", Outcome.COMPLETED, Usage(prompt_tokens=0, output_tokens=0)))
    estimate = driver.scheduler.estimator.estimate(request("x", shape=text))
    assert estimate.expected_prompt_tokens == before
    assert estimate.expected_output_tokens > 0
