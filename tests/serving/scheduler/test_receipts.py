"""Receipts from a real scheduler on a manual clock."""

import asyncio
from typing import Any, cast

import pytest

from serve_app.core import events as ev
from serve_app.errors import Outcome
from serve_app.request import Request, RequestTimes, Usage
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
    def submit(self, request_id: str, named: str = "") -> None:
        self.arrive(request(request_id, arrived_at=self.driver.now, tenant="acme"), named)

    def document(self, name: str) -> dict[str, Any]:
        # Only waiting requests have an estimated start.
        receipts = Receipts(self.driver.scheduler, self.history, cast("QueueWatch", None))
        return asyncio.run(receipts.document(name, self.driver.now))


def request_times(*, first_token_s: float | None = 0.25, grant_s: float = 0.5) -> RequestTimes:
    return RequestTimes("/v1/chat/completions", 0.001, grant_s, first_token_s, 1.5)


@pytest.mark.parametrize("first_token_s", [None, 0.25])
def test_the_stages_add_up_to_the_time_at_the_gateway(first_token_s: float | None) -> None:
    receipt_harness = ReceiptHarness(one_replica())
    fill(receipt_harness.driver)
    receipt_harness.submit("waits", "mine")
    receipt_harness.end("f0", request_times(), after_s=2.0)
    receipt_harness.end("waits", request_times(first_token_s=first_token_s, grant_s=2.25))

    document = receipt_harness.document("mine")
    stages = {each["stage"]: each["ms"] for each in document["stages"]}
    engine = (
        {"engine": 1_500.0} if first_token_s is None else {"until_first_token": 250.0, "generation": 1_250.0}
    )
    assert stages == {"gateway": 1.0, "channel": 250.0, "queue": 2_000.0, **engine}
    assert [(each["cause"], each["ms"]) for each in document["queue"]["causes"]] == [
        ("engines_busy", 2_000.0)
    ]
    assert document["tenant"] == "acme"
    assert document["tokens"]["output"] == 5


def test_the_history_is_bounded_in_number_and_time() -> None:
    receipt_harness = ReceiptHarness(one_replica(), most=2)
    for name in ("a", "b", "c"):
        receipt_harness.submit(name, f"client-{name}")
        receipt_harness.end(name, request_times())
    assert receipt_harness.history.find("a") is receipt_harness.history.find("client-a") is None
    assert receipt_harness.history.find("client-b") is receipt_harness.history.find("b") is not None

    receipt_harness.driver.now += RETENTION_S + 1
    receipt_harness.driver.report("r1")
    receipt_harness.submit("d")
    receipt_harness.end("d", request_times())

    assert len(receipt_harness.history.ended()) == 1
    assert receipt_harness.history.find("c") is None


def test_of_requests_with_one_clients_id_the_last_is_found() -> None:
    receipt_harness = ReceiptHarness(one_replica(), most=2)
    for name in ("a", "b", "c"):
        receipt_harness.submit(name, "same")
        receipt_harness.end(name, request_times())
    found = receipt_harness.history.find("same")
    assert found is not None
    assert found.request_id == "c"
