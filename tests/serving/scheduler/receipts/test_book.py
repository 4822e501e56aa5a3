"""The book of receipts, over a real scheduler on a manual clock."""

import pytest

from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Usage
from serve_app.scheduling import events as ev
from serve_app.scheduling.commands import Conclude, Dispatch
from serve_app.serving.channel.requests.request_book import GatewayRequest, GatewaySession
from serve_app.serving.channel.scheduler_client import RequestTimes
from serve_app.serving.scheduler.receipts.book import KEPT_S, ReceiptBook
from tests.builders import ManualDriver, fill, one_replica

USAGE = Usage(prompt_tokens=50, output_tokens=5)


class Desk:
    """A scheduler, and the book that hears of its commands."""

    def __init__(self, driver: ManualDriver, most: int = 10) -> None:
        self.driver = driver
        self.book = ReceiptBook(lambda _pool, tokens: tokens / 1_000, most)

    def arrive(self, request_id: str) -> None:
        self._note([c for c in self.driver.arrive(request_id) if isinstance(c, Dispatch)])

    def end(
        self, request_id: str, named: str, times: RequestTimes | None = None, *, after_s: float = 0.0
    ) -> None:
        record = GatewayRequest(GatewaySession("g1"), PriorityClass.DEFAULT, 1, tenant="acme")
        record.usage, record.times, record.client_request_id = USAGE, times or told(), named
        finished = ev.Finished(request_id, Outcome.COMPLETED, USAGE)
        for command in self.driver.feed(finished, after_s=after_s):
            if isinstance(command, Conclude):
                self.book.on_conclusion(command, record, self.driver.now)
            elif isinstance(command, Dispatch):
                self._note([command])

    def _note(self, dispatches: list[Dispatch]) -> None:
        for dispatch in dispatches:
            self.book.on_dispatch(dispatch, self.driver.find(dispatch.request_id), self.driver.now)


def told(*, first_token_s: float | None = 0.25, grant_s: float = 0.5) -> RequestTimes:
    return RequestTimes("/v1/chat/completions", 0.001, grant_s, first_token_s, 1.5)


@pytest.mark.parametrize("first_token_s", [None, 0.25])
def test_the_stages_add_up_to_the_time_at_the_gateway(first_token_s: float | None) -> None:
    desk = Desk(one_replica())
    fill(desk.driver)
    desk.arrive("waits")
    desk.end("f0", "other", after_s=2.0)
    desk.end("waits", "mine", told(first_token_s=first_token_s, grant_s=2.25))

    receipt = desk.book.find("mine")
    assert receipt is not None
    document = receipt.document()
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


def test_receipts_are_bounded_in_number_and_time() -> None:
    desk = Desk(one_replica(), most=2)
    for name in ("a", "b", "c"):
        desk.arrive(name)
        desk.end(name, f"client-{name}")
    assert desk.book.find("a") is desk.book.find("client-a") is None
    assert desk.book.find("client-b") is desk.book.find("b") is not None

    desk.driver.now += KEPT_S + 1
    desk.driver.report("r1")
    desk.arrive("d")
    desk.end("d", "client-d")

    assert len(desk.book) == 1
    assert desk.book.find("c") is None


def test_of_requests_with_one_clients_id_the_last_is_found() -> None:
    desk = Desk(one_replica(), most=2)
    for name in ("a", "b", "c"):
        desk.arrive(name)
        desk.end(name, "same")

    found = desk.book.find("same")
    assert found is not None
    assert found.conclude.request_id == "c"
