"""The scheduler by events and commands: routing, dispatch, rejections, losses, learning and time."""

import random
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.commands import Command, Conclude, Dispatch, ReportFresh, ReportStale
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import (
    Arrived,
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Finished,
    FirstToken,
    GatewayLost,
    ReplicaLost,
    Resumed,
    Woke,
)
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PromptShape, Usage
from tests.builders import (
    ONE_POOL,
    ManualDriver,
    concluded,
    dispatched,
    fill,
    one_replica,
    only_conclusion,
    request,
    requests_in_memory,
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


# -- cancelled requests, lost replicas and gateways, and the state given to a new scheduler ---------------


@pytest.fixture
def driver() -> ManualDriver:
    return two_pools()


def test_a_cancelled_request_returns_its_tokens(driver: ManualDriver) -> None:
    fill(driver)
    assert concluded(driver.feed(Cancelled("f0"))) == [("f0", "cancelled")]
    assert driver.scheduler.ledger["s1"].in_flight == 2
    assert driver.feed(Cancelled("f0")) == []


def test_requests_that_have_left_the_queue_use_no_memory() -> None:
    rng, driver, present = random.Random(5), one_replica(), list[str]()
    fill(driver)
    before = requests_in_memory()
    for number in range(2_000):
        if present and rng.random() < 0.48:
            driver.feed(Cancelled(present.pop(rng.randrange(len(present)))))
        else:
            present.append(f"r{number}")
            driver.arrive(present[-1], tenant=f"t{rng.randrange(3)}", prompt_tokens=rng.randrange(1, 900))
    assert requests_in_memory() - before < len(present) + 100
    for name in present[1:]:
        driver.feed(Cancelled(name))
    assert requests_in_memory() - before < 100


def test_requests_of_a_lost_replica_return_to_the_front(driver: ManualDriver) -> None:
    fill(driver)
    fill(driver, "long", prompt_tokens=2_000)
    driver.arrive("waiting")
    driver.feed(ReplicaLost("s1"))
    assert driver.feed(DispatchFailed("f1", "s1", DispatchFailure.UNREACHABLE)) == []
    driver.feed(DispatchFailed("f2", "s1", DispatchFailure.UNREACHABLE))
    for number, following in enumerate(["f1", "f2", "waiting"]):
        assert dispatched(driver.feed(FirstToken(f"long{number}"))) == [(following, "l1")]


def test_a_lost_gateway_releases_queued_requests_and_running_ones_retain_holds(driver: ManualDriver) -> None:
    for number in range(40):
        driver.arrive(f"r{number}", prompt_tokens=2_000, gateway_id="g2")
    driver.arrive("of_another", prompt_tokens=2_000, gateway_id="g1")
    running = {r.request.request_id for r in driver.scheduler.requests.values() if r.replica_id is not None}
    assert 0 < len(running) < 40
    commands = driver.feed(GatewayLost("g2"))
    assert {request_id for request_id, _ in concluded(commands)} == {f"r{n}" for n in range(40)} - running
    assert {outcome for _, outcome in concluded(commands)} == {"cancelled"}
    assert driver.scheduler.ledger["l1"].in_flight == len(running)
    for request_id in (*running, "of_another"):
        driver.feed(Cancelled(request_id))
    assert driver.scheduler.ledger["l1"].in_flight == len(driver.scheduler) == 0


def test_a_new_scheduler_receives_running_requests_before_their_replica_joins() -> None:
    driver = ManualDriver()
    driver.feed(Resumed(request("r"), "s1", started=True))
    assert driver.scheduler.ledger["s1"].held_tokens > 0
    driver.join("s1", "short")
    assert driver.scheduler.ledger["s1"].in_flight == 1
    assert concluded(driver.feed(Finished("r", Outcome.COMPLETED))) == [("r", "completed")]
    assert driver.scheduler.ledger["s1"].held_tokens == 0


@pytest.mark.parametrize("lost", [False, True])
def test_a_running_request_retains_its_deadline_and_put_backs_in_a_new_scheduler(lost: bool) -> None:
    driver = ManualDriver(routing=ONE_POOL)
    running = request("r", expires_at=1.0, attempts=7)
    driver.feed(Resumed(replace(running, lost=lost), "s1", started=False))
    commands = driver.feed(DispatchFailed("r", "s1", DispatchFailure.LOST))
    if lost:
        assert concluded(commands) == [("r", "failed")]
        return
    scheduled = driver.find("r")
    assert (scheduled.attempts.put_backs, scheduled.attempts.losses) == (8, 1)
    driver.join("s2", "only")
    assert concluded(driver.feed(Woke(), after_s=1.0)) == [("r", "expired")]


def test_a_running_request_is_classified_by_a_new_scheduler() -> None:
    driver = ManualDriver(routing=ONE_POOL, policy="ewsjf")
    driver.feed(Resumed(request("r", prompt_tokens=50_000), "s1", started=False))
    assert driver.find("r").prefill_class is PrefillClass.LONGEST


def test_a_request_that_an_earlier_scheduler_had_dispatched_is_queued_at_the_front() -> None:
    driver = ManualDriver(routing=ONE_POOL)
    driver.arrive("new")
    driver.feed(Arrived(request("back", attempts=1, arrived_at=1.0)), after_s=1.0)
    assert dispatched(driver.join("s1", "only")) == [("back", "s1"), ("new", "s1")]


def test_a_request_submitted_twice_is_admitted_once(driver: ManualDriver) -> None:
    assert len(driver.arrive("r")) == 1
    assert driver.arrive("r") == []
    assert len(driver.scheduler) == 1


def test_the_gateway_is_authoritative_about_where_a_request_runs(driver: ManualDriver) -> None:
    driver.arrive("r")
    driver.feed(Resumed(request("r"), "l1", started=False))
    assert driver.scheduler.ledger["s1"].in_flight == 0
    assert driver.scheduler.ledger["l1"].in_flight == 1


def test_events_about_ended_requests_are_ignored(driver: ManualDriver) -> None:
    assert driver.feed(FirstToken("x")) == []
    assert driver.feed(Finished("x", Outcome.COMPLETED)) == []
    assert driver.feed(DispatchFailed("x", "s1", DispatchFailure.LOST)) == []
    driver.arrive("r")
    assert driver.feed(DispatchFailed("r", "l1", DispatchFailure.LOST)) == []


def lose_all(driver: ManualDriver, *names: str) -> list[str]:
    """Lose these replicas and the requests on them, and return the requests that failed."""
    failed = []
    for name in names:
        driver.feed(ReplicaLost(name))
    for running in list(driver.scheduler.requests.values()):
        if running.replica_id in names:
            lost = DispatchFailed(running.request.request_id, running.replica_id, DispatchFailure.LOST)
            failed += [request_id for request_id, _ in concluded(driver.feed(lost))]
    return failed


@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_survives_its_second_loss_if_many_replicas_are_lost_at_once(at_once: bool) -> None:
    driver = ManualDriver(routing=ONE_POOL)
    names = [f"s{number}" for number in range(8)]
    for name in names:
        driver.join(name, "only")
        driver.report(name)
    for name in names:
        driver.arrive(f"r-{name}")
    first = [driver.find(f"r-s{number}").replica_id for number in range(3)]
    dead = [name for name in first if name is not None][: 3 if at_once else 1]
    assert lose_all(driver, *dead) == []
    if not at_once:
        driver.now += 60.0
        for name in names:
            driver.report(name)
    second = driver.find("r-s0").replica_id
    assert second is not None
    # A request that was lost twice is the cause, unless replicas are lost for another reason.
    assert lose_all(driver, second) == ([] if at_once else ["r-s0"])


# -- learning from events, observed in later decisions ----------------------------------------------------

ROOMY = {"max_model_len": 8_000, "kv_tokens": 1_000_000}


def answered(
    driver: ManualDriver, request_id: str, *, first_token_s: float, usage: Usage | None = None, **fields: Any
) -> list[Command]:
    """Run one request on an idle replica, from arrival to end."""
    driver.report("r1")
    commands = driver.arrive(request_id, **fields)
    driver.feed(FirstToken(request_id), after_s=first_token_s)
    driver.feed(Finished(request_id, Outcome.COMPLETED, usage))
    return commands


def estimated(commands: list[Command]) -> int:
    (command,) = commands
    assert isinstance(command, Dispatch)
    return command.estimated_tokens


def test_the_prefill_cost_is_learned_from_single_prefills() -> None:
    driver = one_replica(limits=ROOMY)
    cost = driver.scheduler.prefill_costs.of("only")
    assert cost.seconds(1_000) == pytest.approx(0.13), "the prior"
    for number in range(100):
        tokens = 500 + 1_000 * (number % 2)
        answered(driver, f"r{number}", first_token_s=1e-3 * tokens, prompt_tokens=tokens)
    cost = driver.scheduler.prefill_costs.of("only")
    assert cost.observations == 100
    assert cost.seconds(1_000) == pytest.approx(1.0, rel=0.1)


def test_concurrent_prefills_are_not_learned_from() -> None:
    driver = one_replica(limits=ROOMY)
    for number in range(20):
        for name in ("a", "b"):
            driver.arrive(f"{name}{number}", prompt_tokens=500)
        for name in ("a", "b"):
            driver.feed(FirstToken(f"{name}{number}"), after_s=3.0)
            driver.feed(Finished(f"{name}{number}", Outcome.COMPLETED))
    assert driver.scheduler.prefill_costs.shared.observations == 0


def test_an_engine_that_proves_slow_makes_the_same_wait_count_for_less() -> None:
    # A head of 190 tokens has waited two seconds when one of 100 arrives. At the prior's speed that is 40
    # times its own prefill, enough to go first; on slow engines it is little.
    first = {}
    for name, seconds_per_token in (("fast", 1e-4), ("slow", 1e-2)):
        driver = one_replica(limits={**ROOMY, "max_num_seqs": 1}, policy="ewsjf-paper")
        for number in range(40):
            tokens = 500 + 1_000 * (number % 2)
            seconds = 0.03 + seconds_per_token * tokens
            answered(driver, f"t{number}", first_token_s=seconds, prompt_tokens=tokens)
        driver.report("r1")
        # One in the batch and three in the engine's queue.
        assert all(dispatched(driver.arrive(f"f{number}", prompt_tokens=10)) for number in range(4))
        driver.arrive("older", prompt_tokens=190)
        driver.report("r1", running=3, after_s=2.0)
        driver.arrive("fresh", prompt_tokens=100)
        ((first[name], _),) = dispatched(driver.feed(Finished("f0", Outcome.COMPLETED)))
    assert first == {"fast": "older", "slow": "fresh"}


def test_answer_lengths_are_learned_from_completed_answers() -> None:
    driver = one_replica(limits=ROOMY)
    fields: dict[str, Any] = {"prompt_tokens": 100, "max_output_tokens": None}
    before = estimated(answered(driver, "first", first_token_s=0.1, **fields))
    for number in range(300):
        usage = Usage(prompt_tokens=100, output_tokens=20)
        answered(driver, f"r{number}", first_token_s=0.1, usage=usage, **fields)
    after = estimated(driver.arrive("last", **fields))
    assert after < before / 2
    assert 120 <= after < 200


def test_bytes_per_token_are_learned_from_completed_answers() -> None:
    driver = one_replica(limits=ROOMY)
    text = PromptShape(text_bytes=4_000)
    before = estimated(answered(driver, "first", first_token_s=0.1, shape=text))
    for number in range(300):
        usage = Usage(prompt_tokens=2_000, output_tokens=10)
        answered(driver, f"r{number}", first_token_s=0.1, usage=usage, shape=text)
    after = estimated(driver.arrive("last", shape=text))
    assert before < 1_500
    assert 1_900 < after < 2_500


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_nothing_is_learned_from_an_interrupted_answer(outcome: Outcome) -> None:
    driver = one_replica(limits=ROOMY)
    fields: dict[str, Any] = {"prompt_tokens": 100, "max_output_tokens": None}
    before = driver.scheduler.estimator.state()
    for number in range(300):
        driver.arrive(f"r{number}", **fields)
        driver.feed(FirstToken(f"r{number}"))
        driver.feed(Finished(f"r{number}", outcome, Usage(prompt_tokens=100, output_tokens=1)))
    assert driver.scheduler.estimator.state() == before


@pytest.mark.parametrize(("earlier", "most"), [(100, 1.3), (0, 6.0)])
def test_a_tenants_odd_prompts_teach_others_within_bounds(earlier: int, most: float) -> None:
    driver = one_replica(limits=ROOMY)
    prose, tiny = PromptShape(text_bytes=8_000, messages=1), PromptShape(text_bytes=40, messages=1)
    before = estimated(answered(driver, "before", first_token_s=0.1, shape=prose, tenant="other"))

    def ask(tenant: str, size: PromptShape, tokens: int, number: int) -> None:
        usage = Usage(prompt_tokens=tokens, output_tokens=10)
        answered(driver, f"{tenant}{number}", first_token_s=0.1, usage=usage, shape=size, tenant=tenant)

    for number in range(earlier):
        ask("other", prose, 1_900, number)
    for number in range(300):
        # Its prompts are where no gateway sees them.
        ask("odd", tiny, 10_000, number)
        ask("odd", prose, 30_000, 1_000 + number)
    after = estimated(driver.arrive("after", shape=prose, tenant="other"))
    assert before * 0.8 < after < before * most
    # Where the odd ones came first, one ordinary prompt corrects them, however many they were.
    ask("other", prose, 1_900, 1_000)
    ask("odd", prose, 30_000, 2_000)
    assert before * 0.8 < estimated(driver.arrive("again", shape=prose, tenant="other")) < before * 1.3
