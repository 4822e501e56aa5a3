import pytest

from serve_app.core import events as ev
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.tuning import objective
from serve_app.tuning.objective import OutcomeWindow, record_of
from tests.builders import ManualDriver


class Watched(ManualDriver):
    """A scheduler whose outcomes are recorded as in the live scheduler."""

    def __init__(self) -> None:
        self.window = OutcomeWindow()
        super().__init__(routing=RoutingSettings(pools=("only",)))

    def feed(self, event: ev.Event, *, after_s: float = 0.0) -> list[object]:  # type: ignore[override]
        commands = super().feed(event, after_s=after_s)
        if isinstance(event, ev.Arrived):
            scheduled = self.scheduler.find(event.request.request_id)
            if scheduled is not None:
                self.window.on_arrival(scheduled)
        self.window.on_event(event, commands, self.now)
        return list(commands)


def test_an_answered_request_leaves_its_times_and_the_engines_counts() -> None:
    driver = Watched()
    driver.join("s1", "only")
    driver.arrive("r1", prompt_tokens=40, tenant="a", priority=PriorityClass.INTERACTIVE)
    driver.feed(ev.FirstToken("r1"), after_s=0.5)
    driver.feed(ev.FirstToken("r1"), after_s=0.1)
    driver.feed(ev.Finished("r1", Outcome.COMPLETED, Usage(prompt_tokens=43, output_tokens=9)), after_s=1.0)
    (row,) = driver.window.take()
    record = record_of(row)
    assert (record.arrived_at, record.dispatched_at) == (0.0, 0.0)
    assert (record.first_token_at, record.finished_at) == (0.5, 1.6)
    assert (record.prompt_tokens, record.output_tokens) == (43, 9)
    assert (record.tenant, record.priority, record.pool) == ("a", PriorityClass.INTERACTIVE, "only")
    assert (record.replica, record.length_queue) == ("s1", "all")
    assert record.completed
    assert driver.window.take() == []


def test_one_that_expires_is_an_outcome_without_times_of_service() -> None:
    driver = Watched()
    driver.join("s1", "only", max_num_seqs=1)
    for number in range(8):
        driver.arrive(f"r{number}", expires_at=5.0)
    driver.report("s1", after_s=4.0)
    driver.feed(ev.Woke(), after_s=2.0)
    records = [record_of(row) for row in driver.window.take()]
    assert records
    assert {record.outcome for record in records} == {Outcome.EXPIRED}
    assert {record.dispatched_at for record in records} == {None}


def test_a_request_dispatched_again_waits_for_its_first_token_again() -> None:
    driver = Watched()
    driver.join("s1", "only")
    driver.join("s2", "only")
    driver.arrive("r1")
    scheduled = driver.scheduler.find("r1")
    assert scheduled is not None
    assert scheduled.replica_id is not None
    driver.feed(ev.DispatchFailed("r1", scheduled.replica_id, ev.DispatchFailure.LOST), after_s=1.0)
    driver.feed(ev.Finished("r1", Outcome.COMPLETED), after_s=1.0)
    (row,) = driver.window.take()
    record = record_of(row)
    assert (record.dispatched_at, record.first_token_at) == (1.0, None)
    assert record.prompt_tokens == 40


def test_a_rejection_at_the_door_is_none() -> None:
    driver = Watched()
    driver.arrive("r1", model="another")
    assert driver.window.take() == []


def test_old_outcomes_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "_KEPT", 40)
    driver = Watched()
    driver.join("s1", "only")
    for number in range(50):
        driver.arrive(f"r{number}")
        driver.feed(ev.FirstToken(f"r{number}"))
        driver.feed(ev.Finished(f"r{number}", Outcome.COMPLETED))
    rows = driver.window.take()
    assert len(rows) == 40
    assert rows[-1][0] == "r49"


def test_neither_batch_work_nor_one_old_request_delays_the_judgement_of_others() -> None:
    driver = Watched()
    driver.join("s1", "only")
    driver.arrive("batch", priority=PriorityClass.BATCH)
    assert driver.window.completed_until(30.0) == 30.0
    driver.now = 30.0
    driver.arrive("old")
    assert driver.window.completed_until(60.0) == 30.0
    assert driver.window.completed_until(600.0) == 540.0
