"""Receipts from a real scheduler on a manual clock: all figures, before and after the end of a request."""

import asyncio
from typing import Any

import pytest

from serve_app.core import events as ev
from serve_app.errors import Outcome
from serve_app.request import EngineTimes, PriorityClass, Request, RequestTimes, Usage
from serve_app.serving.scheduler.journal import RETENTION_S, RequestHistory
from serve_app.serving.scheduler.receipts import QueueWatch, Receipts
from tests.builders import ManualDriver, fill, one_replica, request
from tests.serving.scheduler.journals import entry_of, pass_to

USAGE = Usage(prompt_tokens=50, output_tokens=5)


class HistoryHarness:
    """A scheduler on a manual clock, with its request history."""

    def __init__(self, driver: ManualDriver, most: int = 10, prefill_s_per_token: float = 0.0) -> None:
        self.driver = driver
        self.history = RequestHistory(
            lambda _pool, tokens: tokens * prefill_s_per_token, most, unix_clock=lambda: self.driver.now
        )

    def arrive(self, arrival: Request, named: str = "") -> None:
        arrival.client_request_id = named
        self.feed(ev.Arrived(arrival))

    def end(
        self, request_id: str, times: RequestTimes, usage: Usage = USAGE, *, after_s: float = 0.0
    ) -> None:
        self.feed(ev.Finished(request_id, Outcome.COMPLETED, usage, times), after_s=after_s)

    def feed(self, event: ev.Event, *, after_s: float = 0.0) -> None:
        commands = self.driver.feed(event, after_s=after_s)
        pass_to(self.history, entry_of(self.driver.scheduler, self.driver.now, event, commands))


class ReceiptHarness(HistoryHarness):
    """With one replica, whose usual prefill takes 50 ms."""

    def __init__(self, most: int = 10) -> None:
        super().__init__(one_replica(), most, prefill_s_per_token=0.00125)

    def submit(self, request_id: str, named: str = "", tenant: str = "acme", **fields: Any) -> None:
        self.arrive(request(request_id, arrived_at=self.driver.now, tenant=tenant, **fields), named)

    def replace(self, request_id: str) -> None:
        """Let a request end after a second, so that another one is dispatched."""
        self.driver.report("r1", after_s=1.0)
        self.end(request_id, request_times())

    def document(self, name: str) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            core, now = self.driver.scheduler, self.driver.now
            outlook = QueueWatch(core, lambda: now, lambda _: None, lambda _: None)
            return await Receipts(core, self.history, outlook).document(name, now)

        return asyncio.run(read())

    def stages(self, name: str) -> dict[str, float]:
        return {each["stage"]: each["ms"] for each in self.document(name)["stages"]}


def request_times(
    first_token_s: float | None = 0.25, engine: EngineTimes | None = None, *, grant_s: float = 0.5
) -> RequestTimes:
    return RequestTimes("/v1/chat/completions", 0.001, grant_s, first_token_s, 1.5, engine)


@pytest.fixture
def overloaded() -> ReceiptHarness:
    """A full replica, and three queued requests; `theirs` is of a higher class."""
    harness = ReceiptHarness()
    for number in range(3):
        harness.submit(f"f{number}")
    harness.driver.now += 1.0
    harness.submit("before")
    harness.submit("waits", "mine", expires_at=61.0)
    harness.submit("theirs", tenant="rival", priority=PriorityClass.INTERACTIVE)
    return harness


REPORTED = {"engine_queue": 20.0, "prefill": 200.0}


@pytest.mark.parametrize(
    ("first_token_s", "engine", "parts"),
    [
        (None, None, {}),
        (0.25, None, {"engine_queue": 200.0, "prefill": 50.0}),
        # A prefill is not longer than its stage.
        (0.04, None, {"engine_queue": 0.0, "prefill": 40.0}),
        (0.25, EngineTimes(0.02, 0.2, 1.2), {"network": 30.0, **REPORTED}),
        (None, EngineTimes(0.02, 0.2, 1.2), {"network": 80.0, **REPORTED, "generation": 1_200.0}),
    ],
)
def test_the_stages_add_up_to_the_time_at_the_gateway(
    first_token_s: float | None, engine: EngineTimes | None, parts: dict[str, float]
) -> None:
    harness = ReceiptHarness()
    fill(harness.driver)
    harness.submit("waits", "mine")
    harness.end("f0", request_times(), after_s=2.0)
    harness.end("waits", request_times(first_token_s, engine, grant_s=2.25))

    document = harness.document("mine")
    stages = {"engine": 1_500.0}
    if first_token_s is not None:
        stages = {"until_first_token": first_token_s * 1e3, "generation": 1_500.0 - first_token_s * 1e3}
    assert harness.stages("mine") == {"gateway": 1.0, "channel": 250.0, "queue": 2_000.0, **stages}
    shown = {each["stage"]: each["parts"] for each in document["stages"] if "parts" in each}
    assert shown.keys() == ({*stages} - {"generation"} if parts else set())
    found = [part for each in shown.values() for part in each]
    assert {part["part"]: part["ms"] for part in found} == parts
    assert all(part["estimated"] is (engine is None) for part in found)
    (cause,) = document["queue"]["causes"]
    assert (cause["cause"], cause["ms"]) == ("engines_busy", 2_000.0)
    assert (document["outcome"], document["tenant"]) == ("completed", "acme")
    assert document["tokens"]["output"] == 5


def test_a_waiting_request_has_its_place_and_the_reason_of_its_wait(overloaded: ReceiptHarness) -> None:
    overloaded.driver.now += 2.0

    found = overloaded.document("mine")
    facts = {"client_request_id": "mine", "tenant": "acme", "model": "m", "class": "default"}
    assert found.items() >= {**facts, "state": "waiting", "outcome": None, "attempts": []}.items()
    assert overloaded.stages("mine") == {"queue": 2_000.0}
    queue = found["queue"]
    assert [(each["cause"], each["ms"]) for each in queue["causes"]] == [("engines_busy", 2_000.0)]
    place = {"pool": "only", "position": 3, "waiting": 3, "expires_in_ms": 58_000.0}
    reason = {"current_cause": "engines_busy", "obstacles": "only: every replica is at its limit"}
    # Nothing was dispatched while others waited, so no start can be predicted.
    unknown = {"expected_ms": None, "expected_between_ms": None}
    assert queue.items() >= {**place, **reason, **unknown}.items()
    assert overloaded.document("before")["queue"]["position"] == 2


def test_a_start_is_expected_once_others_were_dispatched_and_they_are_counted(
    overloaded: ReceiptHarness,
) -> None:
    overloaded.replace("f0")
    overloaded.replace("f1")

    queue = overloaded.document("mine")["queue"]
    earliest, latest = queue["expected_between_ms"]
    assert 0 < earliest < queue["expected_ms"] < latest
    assert queue["ahead"] == {"higher_class": 1, "own_requests": 1}
    own = {"class": "default", "tenant": "acme", "requests": 1}
    rivals = {"class": "interactive", "tenant": "rival", "requests": 1}
    served = {"pool": "only", "requests": 2, "by": [own, rivals], "others": 0, "is_complete": True}
    assert queue["served"] == served
    overloaded.replace("f2")
    overloaded.submit("later", tenant="rival")
    assert overloaded.document("mine")["queue"]["served"] == served


def test_a_running_request_has_its_stages_so_far(overloaded: ReceiptHarness) -> None:
    for name in ("f0", "f1", "f2"):
        overloaded.replace(name)
    overloaded.driver.now += 0.5

    found = overloaded.document("mine")
    (attempt,) = found["attempts"]
    assert (found["outcome"], found["state"]) == (None, "running")
    assert (attempt["pool"], attempt["replica"], attempt["expected_prefill_ms"]) == ("only", "r1", 50.0)
    assert overloaded.stages("mine") == {"queue": 3_000.0, "until_first_token": 500.0}
    overloaded.feed(ev.FirstToken("waits"))
    overloaded.driver.now += 0.25
    assert overloaded.stages("mine") == {"queue": 3_000.0, "until_first_token": 500.0, "generation": 250.0}


def test_a_request_that_an_earlier_scheduler_dispatched_has_no_time_twice() -> None:
    harness = ReceiptHarness()
    harness.driver.now += 10.0
    harness.feed(ev.Resumed(request("taken", arrived_at=4.0), "r1", started=True))
    harness.driver.now += 1.0
    running = harness.stages("taken")
    assert sum(running.values()) == (harness.driver.now - 4.0) * 1e3

    harness.end("taken", request_times(grant_s=2.0), after_s=1.0)
    assert harness.stages("taken") == {
        "gateway": 1.0,
        "channel": 0.0,
        "queue": 2_000.0,
        "until_first_token": 250.0,
        "generation": 1_250.0,
    }


def test_the_history_is_bounded_in_number_and_time() -> None:
    harness = ReceiptHarness(most=2)
    for name in ("a", "b", "c"):
        harness.submit(name, f"client-{name}")
        harness.end(name, request_times())
    assert harness.document("a") == harness.document("client-a") == {}
    assert harness.document("client-b") == harness.document("b") != {}

    harness.driver.now += RETENTION_S + 1
    harness.driver.report("r1")
    harness.submit("d")
    harness.end("d", request_times())

    assert len(harness.history.ended()) == 1
    assert harness.document("c") == {}


def test_of_requests_with_one_clients_id_the_last_is_found() -> None:
    harness = ReceiptHarness(most=2)
    for name in ("a", "b", "c"):
        harness.submit(name, "same")
        found = harness.document("same")
        assert (found["request_id"], found["state"]) == (name, "running")
        harness.end(name, request_times())
    assert harness.document("same")["request_id"] == "c"
