import pytest

from serve_app.core import events as ev
from serve_app.core.commands import Command
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.serving.scheduler import journal
from serve_app.serving.scheduler.journal import RequestHistory
from tests.builders import ManualDriver, request
from tests.serving.scheduler.journals import entry_of, pass_to


class Watched(ManualDriver):
    """A scheduler whose outcomes are recorded and pulled as in the live scheduler."""

    def __init__(self) -> None:
        self.history = RequestHistory(lambda _pool, _tokens: 0.0)
        self.history.is_pulled = True
        self._ends = 0
        super().__init__(routing=RoutingSettings(pools=("only",)))

    def feed(self, event: ev.Event, *, after_s: float = 0.0) -> list[Command]:
        commands = super().feed(event, after_s=after_s)
        pass_to(self.history, entry_of(self.scheduler, self.now, event, commands))
        return commands

    def pull(self) -> list[RequestRecord]:
        records, self._ends = self.history.outcomes_after(self._ends), self.history.ends
        return records


def test_an_answered_request_leaves_its_times_and_the_engines_counts() -> None:
    driver = Watched()
    driver.join("s1", "only")
    driver.arrive("r1", prompt_tokens=40, tenant="a", priority=PriorityClass.INTERACTIVE)
    driver.feed(ev.FirstToken("r1"), after_s=0.5)
    driver.feed(ev.FirstToken("r1"), after_s=0.1)
    driver.feed(ev.Finished("r1", Outcome.COMPLETED, Usage(prompt_tokens=43, output_tokens=9)), after_s=1.0)
    (record,) = driver.pull()
    assert (record.arrived_at, record.dispatched_at) == (0.0, 0.0)
    assert (record.first_token_at, record.finished_at) == (0.5, 1.6)
    assert (record.prompt_tokens, record.output_tokens) == (43, 9)
    assert (record.tenant, record.priority, record.pool) == ("a", PriorityClass.INTERACTIVE, "only")
    assert (record.replica, record.length_queue) == ("s1", "all")
    assert record.completed
    assert driver.pull() == []


def test_one_that_expires_is_an_outcome_without_times_of_service() -> None:
    driver = Watched()
    driver.join("s1", "only", max_num_seqs=1)
    for number in range(8):
        driver.arrive(f"r{number}", expires_at=5.0)
    driver.report("s1", after_s=4.0)
    driver.feed(ev.Woke(), after_s=2.0)
    records = driver.pull()
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
    (record,) = driver.pull()
    assert (record.dispatched_at, record.first_token_at) == (1.0, None)
    assert record.prompt_tokens == 40


def test_a_rejection_at_the_door_is_none() -> None:
    driver = Watched()
    driver.arrive("r1", model="another")
    assert driver.pull() == []


def test_old_outcomes_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MAX_PULLED", 40)
    driver = Watched()
    driver.join("s1", "only")
    for number in range(50):
        driver.arrive(f"r{number}")
        driver.feed(ev.FirstToken(f"r{number}"))
        driver.feed(ev.Finished(f"r{number}", Outcome.COMPLETED))
    records = driver.pull()
    assert [record.request_id for record in records] == [f"r{number}" for number in range(10, 50)]


def test_neither_batch_work_nor_one_old_request_delays_the_judgement_of_others() -> None:
    driver = Watched()
    driver.join("s1", "only")
    driver.arrive("batch", priority=PriorityClass.BATCH)
    assert driver.history.completed_until(30.0) == 30.0
    driver.now = 30.0
    driver.arrive("old")
    assert driver.history.completed_until(60.0) == 30.0
    assert driver.history.completed_until(600.0) == 540.0


def test_requests_before_the_first_pull_are_not_observed() -> None:
    driver = Watched()
    driver.history.is_pulled = False
    driver.join("s1", "only")
    driver.arrive("before")
    driver.history.is_pulled = True
    driver.arrive("r1")
    for name in ("before", "r1"):
        driver.feed(ev.Finished(name, Outcome.COMPLETED), after_s=1.0)
    assert [record.request_id for record in driver.pull()] == ["r1"]


def test_a_request_that_an_earlier_scheduler_admitted_is_not_observed() -> None:
    driver = Watched()
    driver.join("s1", "only")
    driver.feed(ev.Resumed(request("r1"), "s1", started=False))
    assert driver.history.completed_until(30.0) == 30.0
    driver.feed(ev.Finished("r1", Outcome.COMPLETED), after_s=1.0)
    assert driver.pull() == []
