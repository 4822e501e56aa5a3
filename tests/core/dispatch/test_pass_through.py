"""Pass-through requests in observe mode, beside scheduled ones."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.decision_log import Decision, LoggedRun, RunHeader, replay
from serve_app.core.events import (
    ActiveShareChanged,
    Arrived,
    DispatchFailed,
    DispatchFailure,
    Event,
    Finished,
    ReplicaJoined,
    ReplicaLost,
    ReplicaReported,
)
from serve_app.errors import Outcome
from tests.builders import ONE_POOL, ManualDriver, report, request, spec


def fleet(active_share: float, replicas: int = 3, **limits: int) -> ManualDriver:
    driver = ManualDriver(routing=ONE_POOL, active_share=active_share)
    for number in range(replicas):
        driver.join(f"s{number}", "only", **limits)
    return driver


def sent(driver: ManualDriver, count: int) -> list[Dispatch]:
    found = []
    for number in range(count):
        commands = driver.arrive(f"r{number}")
        found += [command for command in commands if isinstance(command, Dispatch)]
    return found


def test_in_observe_mode_every_request_is_dispatched_immediately_to_the_least_loaded() -> None:
    driver = fleet(0.0, max_num_seqs=2)
    found = sent(driver, 30)
    assert len(found) == 30
    assert all(each.passed and each.queue_wait_s == 0 for each in found)
    assert Counter(each.replica_id for each in found) == {"s0": 10, "s1": 10, "s2": 10}
    # The ledger counts them all the same.
    assert sum(state.in_flight for state in driver.scheduler.ledger) == 30
    driver.feed(Finished(found[0].request_id, Outcome.COMPLETED))
    assert driver.scheduler.ledger["s0"].in_flight == 9


def test_at_a_share_of_one_no_request_bypasses_the_scheduler() -> None:
    driver = fleet(1.0, max_num_seqs=1)
    found = sent(driver, 60)
    assert 0 < len(found) < 60
    assert not any(each.passed for each in found)


def test_a_share_is_scheduled_and_the_same_requests_each_time() -> None:
    passed = {each.request_id for each in sent(fleet(0.3, replicas=1, max_num_seqs=2), 1000) if each.passed}
    assert 650 <= len(passed) <= 750
    again = {each.request_id for each in sent(fleet(0.3, replicas=2), 1000) if each.passed}
    assert again == passed


def test_a_larger_share_only_adds_scheduled_requests() -> None:
    of_share = {
        share: {each.request_id for each in sent(fleet(share, 1), 300) if each.passed} for share in (0.2, 0.6)
    }
    assert of_share[0.6] < of_share[0.2]


def test_the_share_can_be_changed_and_restored() -> None:
    driver = fleet(1.0, replicas=1, max_num_seqs=1)
    sent(driver, 20)
    waiting = len(driver.scheduler.queue)
    assert waiting
    driver.feed(ActiveShareChanged(0.0))
    (went,) = driver.arrive("later")
    assert isinstance(went, Dispatch)
    assert went.passed
    # Queued requests are unaffected.
    assert len(driver.scheduler.queue) == waiting
    driver.feed(ActiveShareChanged(1.0))
    assert driver.arrive("last") == []


def test_without_a_live_replica_a_bypassing_request_waits() -> None:
    driver = fleet(0.0, replicas=1)
    driver.feed(ReplicaLost("s0"))
    assert driver.arrive("r") == []
    driver.join("s1", "only")
    assert driver.find("r").replica_id == "s1"


def test_a_bypassing_request_too_long_for_every_replica_is_rejected() -> None:
    driver = fleet(0.0)
    (rejected,) = driver.arrive("r", prompt_tokens=10_000_000)
    assert isinstance(rejected, Conclude)
    assert rejected.conclusion.outcome is Outcome.REJECTED_TOO_LONG


def test_a_bypassing_request_is_retried_on_another_replica() -> None:
    driver = fleet(0.0)
    (went,) = sent(driver, 1)
    commands = driver.feed(DispatchFailed("r0", went.replica_id, DispatchFailure.UNREACHABLE))
    again = [each for each in commands if isinstance(each, Dispatch)]
    assert [each.replica_id != went.replica_id for each in again] == [True]
    # Only arrivals bypass the scheduler.
    assert [each.passed for each in again] == [False]


@given(
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    arrivals=st.lists(st.integers(1, 500), min_size=1, max_size=60),
)
def test_every_request_is_sent_or_waits_and_the_log_replays(shares: list[float], arrivals: list[int]) -> None:
    driver = ManualDriver(routing=ONE_POOL, active_share=shares[0])
    decisions: list[tuple[int, Decision]] = []
    before = driver.scheduler

    def feed(event: Event) -> None:
        decisions.append((len(decisions), Decision(driver.now, event, tuple(driver.feed(event)))))

    for replica_id in ("s0", "s1"):
        feed(ReplicaJoined(spec(replica_id, "only", max_num_seqs=3)))
        feed(ReplicaReported(replica_id, report()))

    for number, tokens in enumerate(arrivals):
        feed(ActiveShareChanged(shares[number % len(shares)]))
        feed(Arrived(request(f"r{number}", prompt_tokens=tokens)))
        running = sum(state.in_flight for state in before.ledger)
        assert running + len(before.queue) == len(before)
        for state in before.ledger:
            held = [before.find(f"r{one}") for one in range(number + 1)]
            mine = [each for each in held if each and each.replica_id == state.spec.replica_id]
            assert state.held_tokens == sum(each.hold.tokens for each in mine)
    assert replay(LoggedRun(RunHeader(settings=before.settings), decisions)) is None
