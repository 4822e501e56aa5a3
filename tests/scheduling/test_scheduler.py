import pytest

from serve_app.errors import Conclusion, Outcome
from serve_app.request import Usage
from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling.commands import Conclude, Dispatch, ReportFresh, ReportStale
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.scheduling.events import (
    Arrived,
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Finished,
    FirstToken,
    GatewayLost,
    ReplicaJoined,
    ReplicaLost,
    Resumed,
    Woke,
)
from tests.builders import ManualDriver, concluded, dispatched, request, spec


@pytest.fixture
def driver() -> ManualDriver:
    driver = ManualDriver()
    driver.join("s1", "short", max_model_len=1_000)
    driver.join("l1", "long", max_model_len=4_000, kv_tokens=16_000)
    return driver


def fill_short(driver: ManualDriver) -> None:
    """Three requests whose answers have not begun close a replica."""
    for number in range(3):
        driver.arrive(f"f{number}")


def test_a_request_is_dispatched_at_once_when_there_is_room(driver: ManualDriver) -> None:
    (command,) = driver.arrive("r1", prompt_tokens=40, max_output_tokens=10)
    assert command == Dispatch(
        request_id="r1",
        gateway_id="g1",
        replica_id="s1",
        pool="short",
        length_queue="all",
        estimated_tokens=50,
        queue_wait_s=0.0,
    )


def test_a_budget_above_b_short_goes_to_the_long_pool(driver: ManualDriver) -> None:
    assert dispatched(driver.arrive("r1", prompt_tokens=480, max_output_tokens=20)) == [("r1", "s1")]
    assert dispatched(driver.arrive("r2", prompt_tokens=480, max_output_tokens=21)) == [("r2", "l1")]


def test_a_short_request_spills_when_its_pool_has_no_room_and_a_long_one_spills_back(
    driver: ManualDriver,
) -> None:
    fill_short(driver)
    assert dispatched(driver.arrive("spilled")) == [("spilled", "l1")]
    other = ManualDriver()
    other.join("s1", "short", max_model_len=1_000)
    other.join("l1", "long", max_model_len=4_000)
    sent = [dispatched(other.arrive(f"r{n}", prompt_tokens=600))[0][1] for n in range(4)]
    assert sent == ["l1", "l1", "l1", "s1"]


def test_a_request_that_the_other_pool_cannot_hold_waits_for_its_own(driver: ManualDriver) -> None:
    for number in range(3):
        driver.arrive(f"long{number}", prompt_tokens=2_000)
    assert driver.arrive("r", prompt_tokens=2_000) == []
    assert dispatched(driver.feed(FirstToken("long0"))) == [("r", "l1")]


def test_without_spill_a_request_waits_for_its_home() -> None:
    driver = ManualDriver(routing=RoutingSettings(b_short_tokens=500, spill=False))
    driver.join("s1", "short", max_model_len=1_000)
    driver.join("l1", "long", max_model_len=4_000)
    fill_short(driver)
    assert driver.arrive("r") == []


def test_those_at_home_go_before_those_that_spill(driver: ManualDriver) -> None:
    fill_short(driver)
    for number in range(3):
        driver.arrive(f"long{number}", prompt_tokens=2_000)
    assert driver.arrive("short") == []
    assert driver.arrive("long", prompt_tokens=2_000) == []
    assert dispatched(driver.feed(FirstToken("long0"))) == [("long", "l1")]
    assert dispatched(driver.feed(FirstToken("long1"))) == [("short", "l1")]


def test_a_dispatch_holds_expected_tokens_and_its_end_returns_them(driver: ManualDriver) -> None:
    driver.arrive("r1", prompt_tokens=40, max_output_tokens=10)
    held = driver.scheduler.ledger["s1"].held_tokens
    assert 40 < held <= 50
    commands = driver.feed(Finished("r1", Outcome.COMPLETED, Usage(prompt_tokens=40, output_tokens=10)))
    assert commands == [
        Conclude(request_id="r1", gateway_id="g1", conclusion=Conclusion(Outcome.COMPLETED), dispatched=True)
    ]
    state = driver.scheduler.ledger["s1"]
    assert (state.held_tokens, state.in_flight, state.unstarted, state.unseen) == (0, 0, 0, 0)
    assert len(driver.scheduler) == 0


def test_the_engine_queue_is_kept_at_its_target(driver: ManualDriver) -> None:
    driver = ManualDriver(routing=RoutingSettings(pools=("short",)))
    driver.join("s1", "short")
    assert [len(driver.arrive(f"r{n}")) for n in range(5)] == [1, 1, 1, 0, 0]
    # The engine has taken all three into its batch: three more may go.
    assert dispatched(driver.report(received=3, waiting=0, running=3, after_s=0.2)) == [
        ("r3", "s1"),
        ("r4", "s1"),
    ]


def test_requests_on_their_way_count_although_the_report_has_not_seen_them() -> None:
    driver = ManualDriver(routing=RoutingSettings(pools=("short",)))
    driver.join("s1", "short")
    for number in range(4):
        driver.arrive(f"r{number}")
    # Only one of the three sent has reached the engine when the report is made, and it waits there.
    assert dispatched(driver.report(received=1, waiting=1, after_s=0.2)) == []
    assert dispatched(driver.report(received=2, waiting=1, after_s=0.2)) == [("r3", "s1")]


def test_the_batch_size_limits_what_a_replica_runs() -> None:
    driver = ManualDriver(routing=RoutingSettings(pools=("short",)))
    driver.join("s1", "short", max_num_seqs=2)
    for number in range(8):
        driver.arrive(f"r{number}")
        driver.feed(FirstToken(f"r{number}"))
    assert driver.scheduler.ledger["s1"].in_flight == 2 + 3


def test_a_head_that_does_not_fit_the_kv_budget_holds_up_the_lane() -> None:
    driver = ManualDriver(routing=RoutingSettings(pools=("short",)))
    driver.join("s1", "short", max_model_len=1_000, kv_tokens=1_500)
    driver.arrive("big", prompt_tokens=900, max_output_tokens=50)
    assert driver.arrive("big2", prompt_tokens=900, max_output_tokens=50) == []
    assert driver.arrive("small", prompt_tokens=10) == []
    assert dispatched(driver.feed(Finished("big", Outcome.COMPLETED))) == [("big2", "s1"), ("small", "s1")]


def test_the_replica_with_the_most_free_tokens_is_chosen() -> None:
    driver = ManualDriver(routing=RoutingSettings(pools=("short",)))
    driver.join("s1", "short")
    driver.join("s2", "short")
    assert dispatched(driver.arrive("a", prompt_tokens=400)) == [("a", "s1")]
    assert dispatched(driver.arrive("b", prompt_tokens=100)) == [("b", "s2")]
    assert dispatched(driver.arrive("c", prompt_tokens=100)) == [("c", "s2")]
    assert dispatched(driver.arrive("d", prompt_tokens=100)) == [("d", "s2")]
    assert dispatched(driver.arrive("e", prompt_tokens=100)) == [("e", "s1")]


def test_too_long_for_every_pool_is_refused_with_numbers(driver: ManualDriver) -> None:
    (command,) = driver.arrive("r", prompt_tokens=4_000, max_output_tokens=1)
    assert isinstance(command, Conclude)
    assert command.conclusion.outcome is Outcome.REJECTED_TOO_LONG
    assert "4000" in command.conclusion.message
    assert "4001" in command.conclusion.message
    assert command.conclusion.retry_after_s is None


def test_a_full_queue_refuses_with_a_time_to_come_again() -> None:
    driver = ManualDriver(max_waiting=2)
    driver.join("s1")
    fill_short(driver)
    driver.arrive("w1")
    driver.arrive("w2")
    (command,) = driver.arrive("w3")
    assert isinstance(command, Conclude)
    assert command.conclusion.outcome is Outcome.REJECTED_QUEUE_FULL
    assert command.conclusion.retry_after_s is not None
    assert 0 < command.conclusion.retry_after_s <= 60


def test_retry_after_follows_the_measured_drain_rate() -> None:
    def retry_after_s(finished_per_s: float) -> float:
        # Without growth by pace, three requests close the replica whatever its pace was.
        driver = ManualDriver(
            max_waiting=1,
            routing=RoutingSettings(pools=("short",)),
            backpressure=BackpressureSettings(lag_factor=0.0),
        )
        driver.join("s1", "short")
        fill_short(driver)
        driver.arrive("r0")
        running = ["f0", "f1", "f2"]
        for number in range(1, 40):
            driver.feed(Finished(running.pop(0), Outcome.COMPLETED), after_s=1 / finished_per_s)
            driver.report(received=number + 2, waiting=3)
            running.append(f"r{number - 1}")
            driver.arrive(f"r{number}")
        (command,) = driver.arrive("one too many")
        assert isinstance(command, Conclude)
        assert command.conclusion.outcome is Outcome.REJECTED_QUEUE_FULL
        assert command.conclusion.retry_after_s is not None
        return command.conclusion.retry_after_s

    slow, fast = retry_after_s(0.5), retry_after_s(5.0)
    assert slow == pytest.approx(10 * fast, rel=0.4)


def test_an_unknown_model_is_refused_by_name(driver: ManualDriver) -> None:
    (command,) = driver.arrive("r", model="other")
    assert isinstance(command, Conclude)
    assert command.conclusion.outcome is Outcome.REJECTED_UNKNOWN_MODEL
    assert "other" in command.conclusion.message


def test_an_alias_is_served() -> None:
    driver = ManualDriver(aliases=("m-lora",))
    driver.join("s1")
    assert dispatched(driver.arrive("r", model="m-lora")) == [("r", "s1")]


def test_a_request_expires_when_its_time_in_the_queue_is_over(driver: ManualDriver) -> None:
    fill_short(driver)
    for number in range(3):
        driver.arrive(f"long{number}", prompt_tokens=2_000)
    driver.arrive("w", expires_at=2.0)
    assert driver.scheduler.next_wakeup() == 2.0
    assert concluded(driver.feed(Woke(), after_s=2.0)) == [("w", "expired")]
    assert len(driver.scheduler.queue) == 0


def test_expiry_comes_before_dispatch_in_the_same_instant(driver: ManualDriver) -> None:
    fill_short(driver)
    for number in range(3):
        driver.arrive(f"long{number}", prompt_tokens=2_000)
    driver.arrive("w", expires_at=2.0)
    commands = driver.feed(FirstToken("f0"), after_s=2.0)
    assert concluded(commands) == [("w", "expired")]
    assert dispatched(commands) == []


def test_a_cancelled_request_leaves_the_queue_or_returns_its_tokens(driver: ManualDriver) -> None:
    fill_short(driver)
    assert concluded(driver.feed(Cancelled("f0"))) == [("f0", "cancelled")]
    assert driver.scheduler.ledger["s1"].in_flight == 2
    assert driver.feed(Cancelled("f0")) == []


def test_a_request_that_asks_not_to_wait_is_dispatched_or_refused_at_once(driver: ManualDriver) -> None:
    assert dispatched(driver.arrive("a", no_wait=True, prompt_tokens=2_000)) == [("a", "l1")]
    driver.arrive("b", prompt_tokens=2_000)
    driver.arrive("c", prompt_tokens=2_000)
    (command,) = driver.arrive("d", no_wait=True, prompt_tokens=2_000)
    assert isinstance(command, Conclude)
    assert command.conclusion.outcome is Outcome.REJECTED_QUEUE_FULL
    assert "asked not to wait" in command.conclusion.message


def test_a_lost_replica_gives_its_requests_back_to_the_front(driver: ManualDriver) -> None:
    fill_short(driver)
    for number in range(3):
        driver.arrive(f"long{number}", prompt_tokens=2_000)
    driver.arrive("waiting")
    driver.feed(ReplicaLost("s1"))
    assert driver.feed(DispatchFailed("f1", "s1", DispatchFailure.LOST)) == []
    driver.feed(DispatchFailed("f2", "s1", DispatchFailure.LOST))
    assert dispatched(driver.feed(FirstToken("long0"))) == [("f1", "l1")]
    assert dispatched(driver.feed(FirstToken("long1"))) == [("f2", "l1")]
    assert dispatched(driver.feed(FirstToken("long2"))) == [("waiting", "l1")]


def test_a_lost_replica_is_forgotten_when_its_last_request_is_released(driver: ManualDriver) -> None:
    driver.arrive("r")
    driver.feed(ReplicaLost("s1"))
    assert [state.spec.replica_id for state in driver.scheduler.ledger] == ["s1", "l1"]
    driver.feed(Finished("r", Outcome.COMPLETED))
    assert [state.spec.replica_id for state in driver.scheduler.ledger] == ["l1"]


def test_a_request_lost_on_three_replicas_fails(driver: ManualDriver) -> None:
    driver.arrive("r")
    for _ in range(2):
        replica = driver.scheduler.find("r").replica_id  # type: ignore[union-attr]
        assert replica is not None
        driver.feed(DispatchFailed("r", replica, DispatchFailure.LOST))
        driver.report("s1")
        driver.report("l1")
    replica = driver.scheduler.find("r").replica_id  # type: ignore[union-attr]
    assert replica is not None
    (command,) = driver.feed(DispatchFailed("r", replica, DispatchFailure.LOST, "the engine died"))
    assert isinstance(command, Conclude)
    assert (command.conclusion.outcome, command.dispatched) == (Outcome.FAILED, True)
    assert "the engine died" in command.conclusion.message


@pytest.mark.parametrize("failure", [DispatchFailure.UNREACHABLE, DispatchFailure.BUSY])
def test_a_replica_that_refuses_gets_nothing_until_it_reports(failure: DispatchFailure) -> None:
    driver = ManualDriver(routing=RoutingSettings(pools=("short",)))
    driver.join("s1", "short")
    driver.arrive("r")
    assert driver.feed(DispatchFailed("r", "s1", failure)) == []
    assert dispatched(driver.report("s1")) == [("r", "s1")]


def test_what_the_short_engine_finds_too_long_goes_to_the_long_pool(driver: ManualDriver) -> None:
    driver.arrive("r")
    assert dispatched(driver.feed(DispatchFailed("r", "s1", DispatchFailure.TOO_LONG))) == [("r", "l1")]
    (command,) = driver.feed(
        DispatchFailed("r", "l1", DispatchFailure.TOO_LONG, "maximum context length is 4000")
    )
    assert isinstance(command, Conclude)
    assert command.conclusion.outcome is Outcome.REJECTED_TOO_LONG
    assert command.conclusion.message == "maximum context length is 4000"


def test_a_report_that_is_too_old_closes_the_replica_until_the_next() -> None:
    driver = ManualDriver(
        routing=RoutingSettings(pools=("short",)), backpressure=BackpressureSettings(report_limit_s=2.0)
    )
    driver.join("s1", "short")
    assert driver.scheduler.next_wakeup() == 2.0
    assert driver.feed(Woke(), after_s=2.0) == [ReportStale(replica_id="s1", age_s=2.0)]
    assert driver.arrive("r") == []
    commands = driver.report(after_s=1.0)
    assert commands[0] == ReportFresh(replica_id="s1")
    assert dispatched(commands) == [("r", "s1")]


def test_a_draining_replica_gets_nothing_new(driver: ManualDriver) -> None:
    driver.report("s1", draining=True)
    assert dispatched(driver.arrive("r")) == [("r", "l1")]


def test_a_gateway_that_dies_releases_all_its_requests(driver: ManualDriver) -> None:
    for number in range(4):
        driver.arrive(f"r{number}", prompt_tokens=2_000, gateway_id="g2")
    assert len(driver.scheduler) == 4
    commands = driver.feed(GatewayLost("g2"))
    assert sorted(request_id for request_id, _ in concluded(commands)) == ["r0", "r1", "r2", "r3"]
    assert {outcome for _, outcome in concluded(commands)} == {"cancelled"}
    assert driver.scheduler.ledger["l1"].in_flight == 0


def test_a_new_scheduler_takes_over_running_requests_before_their_replica_joins() -> None:
    driver = ManualDriver()
    driver.feed(Resumed(request("r"), "s1", started=True))
    assert driver.scheduler.ledger["s1"].held_tokens > 0
    driver.join("s1", "short")
    assert driver.scheduler.ledger["s1"].in_flight == 1
    assert concluded(driver.feed(Finished("r", Outcome.COMPLETED))) == [("r", "completed")]
    assert driver.scheduler.ledger["s1"].held_tokens == 0


def test_a_request_that_an_earlier_scheduler_had_dispatched_goes_to_the_front() -> None:
    driver = ManualDriver(routing=RoutingSettings(pools=("short",)))
    driver.arrive("new")
    driver.feed(Arrived(request("back", attempts=1, arrived_at=1.0)), after_s=1.0)
    assert dispatched(driver.join("s1", "short")) == [("back", "s1"), ("new", "s1")]


def test_a_request_submitted_twice_is_taken_once(driver: ManualDriver) -> None:
    assert len(driver.arrive("r")) == 1
    assert driver.arrive("r") == []
    assert len(driver.scheduler) == 1


def test_the_gateway_is_right_about_where_a_request_runs(driver: ManualDriver) -> None:
    driver.arrive("r")
    driver.feed(Resumed(request("r"), "l1", started=False))
    assert driver.scheduler.ledger["s1"].in_flight == 0
    assert driver.scheduler.ledger["l1"].in_flight == 1


def test_without_any_replica_requests_wait_for_one_and_are_refused_after_the_grace() -> None:
    driver = ManualDriver(no_replica_grace_s=10.0)
    assert driver.arrive("r") == []
    driver.now = 11.0
    (command,) = driver.arrive("late")
    assert isinstance(command, Conclude)
    assert command.conclusion.outcome is Outcome.REJECTED_NO_REPLICA
    assert dispatched(driver.join("s1", "short")) == [("r", "s1")]


def test_waiting_requests_are_routed_again_when_a_pool_turns_out_too_small() -> None:
    driver = ManualDriver()
    driver.arrive("r", prompt_tokens=450, max_output_tokens=40)
    assert dispatched(driver.join("s1", "short", max_model_len=300)) == []
    assert dispatched(driver.join("l1", "long", max_model_len=4_000)) == [("r", "l1")]


def test_time_never_goes_back(driver: ManualDriver) -> None:
    driver.feed(Woke(), after_s=1.0)
    with pytest.raises(ValueError, match=r"time went back from 1\.0 to 0\.5"):
        driver.scheduler.handle(Woke(), 0.5)


def test_events_about_requests_that_are_over_change_nothing(driver: ManualDriver) -> None:
    assert driver.feed(FirstToken("x")) == []
    assert driver.feed(Finished("x", Outcome.COMPLETED)) == []
    assert driver.feed(DispatchFailed("x", "s1", DispatchFailure.LOST)) == []
    driver.arrive("r")
    assert driver.feed(DispatchFailed("r", "l1", DispatchFailure.LOST)) == []


def test_its_repr_counts() -> None:
    driver = ManualDriver()
    assert repr(driver.scheduler) == "<Scheduler m waiting=0 running=0 <ReplicaLedger joined=0 []>>"
    driver.feed(ReplicaJoined(spec()))
    driver.feed(Arrived(request()))
    assert "waiting=1 running=0" in repr(driver.scheduler)
