"""Receipts: where the time of each request went, for those that ended in the last ten minutes.

The scheduler knows why a request waited, its gateway how long everything else took. The gateway tells that
with the request's end, so a receipt is whole here, whichever gateway is asked for it. Times of the gateway
and of the scheduler are differences on one clock each, so no clocks are compared.

Who was served while a request waited is counted when somebody asks, from the receipts that are kept anyway.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from serve_app.request import Request
from serve_app.scheduling.commands import Conclude, Dispatch
from serve_app.scheduling.request import ScheduledRequest
from serve_app.serving.channel.requests.request_book import GatewayRequest
from serve_app.serving.channel.scheduler_client import RequestTimes
from serve_app.serving.scheduler.receipts.receipt import AskedRequest, Attempt, Receipt
from serve_app.serving.scheduler.receipts.served import WaitedFor, served_during

KEPT_S = 600.0
# About 30 MB.
MOST_KEPT = 20_000


class ReceiptBook:
    """The receipts of one scheduler.

    Args:
        prefill_s: how long a prefill takes in a pool, by its tokens, as learned so far.
        most: how many are kept at once.
        since: when it began, on the scheduler's clock.

    Attributes:
        dispatches: how many it has been told of.
    """

    def __init__(
        self, prefill_s: Callable[[str, int], float], most: int = MOST_KEPT, *, since: float = -math.inf
    ) -> None:
        self._prefill_s = prefill_s
        self._most = most
        self.dispatches = 0
        # Of requests that wait and were never sent, the pool whose places they wait for.
        self._waiting: dict[str, str] = {}
        self._running: dict[str, tuple[Attempt, ...]] = {}
        self._asked: dict[str, AskedRequest] = {}
        self._kept: deque[Receipt] = deque()
        # All that ended before is not here, or not any more.
        self._known_since = since
        self._by_id: dict[str, Receipt] = {}

    def __repr__(self) -> str:
        return f"<ReceiptBook {len(self._kept)} kept, {len(self._running)} under way>"

    def on_arrival(self, request: Request) -> None:
        """A request has come, whatever becomes of it."""
        self._asked[request.request_id] = AskedRequest.of(request)

    def on_wait(self, scheduled: ScheduledRequest) -> None:
        """A request has come, and waits."""
        self._waiting[scheduled.request.request_id] = scheduled.pools[0] if scheduled.pools else ""

    def on_dispatch(self, command: Dispatch, scheduled: ScheduledRequest, now: float) -> None:
        """A request was sent to a replica."""
        estimate, prediction = scheduled.estimate, scheduled.prediction
        prefill_tokens, request = scheduled.prefill_tokens, scheduled.request
        self.dispatches += 1
        self._waiting.pop(command.request_id, None)
        attempt = Attempt(
            self.dispatches,
            now,
            command,
            request.tenant,
            request.priority.value,
            scheduled.pools,
            estimate.expected_prompt_tokens,
            prefill_tokens,
            estimate.expected_output_tokens,
            self._prefill_s(command.pool, prefill_tokens),
            prediction.wait_s if prediction is not None else None,
        )
        self._running[command.request_id] = (*self._running.get(command.request_id, ()), attempt)

    def on_conclusion(self, command: Conclude, record: GatewayRequest, now: float) -> None:
        """A request has reached its outcome."""
        attempts = self._running.pop(command.request_id, ())
        pool = self._waiting.pop(command.request_id, "")
        receipt = Receipt(
            came_at=record.arrived_at,
            ended_at=now,
            arrived_at=time.time() - (now - record.arrived_at),
            conclude=command,
            model=record.model,
            tenant=record.tenant,
            priority=record.priority.value,
            pool=attempts[-1].dispatch.pool if attempts else pool,
            asked=self._asked.pop(command.request_id, None),
            attempts=attempts,
            usage=record.usage,
            times=record.times,
            client_request_id=record.client_request_id,
        )
        self._kept.append(receipt)
        for name in _names(receipt):
            self._by_id[name] = receipt
        while len(self._kept) > self._most or self._kept[0].ended_at < now - KEPT_S:
            self._forget(self._kept.popleft())

    def on_times(self, request_id: str, times: RequestTimes) -> None:
        """A gateway tells of a request that ended in the queue; an end that is told twice changes nothing."""
        receipt = self._by_id.get(request_id)
        if receipt is not None and receipt.times is None and receipt.conclude.request_id == request_id:
            receipt.times = times

    def under_way(self) -> Iterator[tuple[AskedRequest, tuple[Attempt, ...]]]:
        """Every request that has not ended, with its dispatches."""
        for request_id, asked in self._asked.items():
            yield asked, self._running.get(request_id, ())

    def find(self, request_id: str) -> Receipt | None:
        """The receipt of a request by its own id, or by the last request's to which a client gave that id."""
        return self._by_id.get(request_id)

    def attempts_of(self, request_id: str) -> tuple[Attempt, ...]:
        """The dispatches so far of a request that has not ended."""
        return self._running.get(request_id, ())

    async def document(self, receipt: Receipt) -> dict[str, Any]:
        """A receipt for admins, with the names of others."""
        if not receipt.waited.causes or not receipt.pool:
            return receipt.document()
        wait = WaitedFor(
            request_id=receipt.conclude.request_id,
            pool=receipt.pool,
            since=receipt.came_at,
            until=receipt.ended_at,
            before=self.dispatches + 1 if receipt.ended_waiting else receipt.attempts[-1].number,
        )
        return receipt.document(await self.served(wait))

    async def served(self, wait: WaitedFor) -> dict[str, Any]:
        """Whose requests were served during a wait."""
        # Copies: more may end while somebody looks at these.
        running, kept = tuple(self._running.values()), tuple(self._kept)
        attempts = _attempts(running, kept, wait.since)
        return await served_during(wait, attempts, is_complete=self._known_since <= wait.since)

    def __iter__(self) -> Iterator[Receipt]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _forget(self, receipt: Receipt) -> None:
        self._known_since = receipt.ended_at
        for name in _names(receipt):
            if self._by_id.get(name) is receipt:
                del self._by_id[name]


def _attempts(
    running: Iterable[tuple[Attempt, ...]], kept: Sequence[Receipt], since: float
) -> Iterator[Attempt]:
    """Of all requests that had not ended by then."""
    for attempts in running:
        yield from attempts
    for receipt in reversed(kept):
        if receipt.ended_at < since:
            break
        yield from receipt.attempts


def _names(receipt: Receipt) -> set[str]:
    """The ids that a receipt is found by."""
    own, clients = receipt.conclude.request_id, receipt.client_request_id
    return {own, clients} if clients else {own}
