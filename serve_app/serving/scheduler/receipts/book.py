"""Receipts: where the time of each request went, for those that ended in the last ten minutes.

The scheduler knows why a request waited, its gateway how long everything else took. The gateway tells that
with the request's end, so a receipt is whole here, whichever gateway is asked for it. Times of the gateway
and of the scheduler are differences on one clock each, so no clocks are compared.

Who was served while a request waited is counted when somebody asks, from the receipts that are kept anyway.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from serve_app.request import Request
from serve_app.scheduling.commands import Conclude, Dispatch
from serve_app.scheduling.request import ScheduledRequest
from serve_app.serving.channel.requests.request_book import GatewayRequest
from serve_app.serving.channel.scheduler_client import RequestTimes
from serve_app.serving.scheduler.receipts.receipt import AskedRequest, Attempt, Receipt

KEPT_S = 600.0
# About 30 MB.
MOST_KEPT = 20_000
MOST_SERVED = 10
"""Tenants and classes that a receipt names; the others are counted together."""
# Dispatches between two breaths of the event loop: about half a millisecond.
_LOOKED_AT = 1_000


class ReceiptBook:
    """The receipts of one scheduler.

    Args:
        prefill_s: how long a prefill takes in a pool, by its tokens, as learned so far.
        most: how many are kept at once.
        since: when it began, on the scheduler's clock.
    """

    def __init__(
        self, prefill_s: Callable[[str, int], float], most: int = MOST_KEPT, *, since: float = -math.inf
    ) -> None:
        self._prefill_s = prefill_s
        self._most = most
        self._dispatches = 0
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
        self._dispatches += 1
        self._waiting.pop(command.request_id, None)
        attempt = Attempt(
            self._dispatches,
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

    async def document(self, request_id: str) -> dict[str, Any]:
        """A receipt for admins, with the names of others; empty where there is none."""
        receipt = self.find(request_id)
        return {} if receipt is None else receipt.document(await self._served_before(receipt))

    def __iter__(self) -> Iterator[Receipt]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    async def _served_before(self, receipt: Receipt) -> dict[str, Any] | None:
        """Whose requests were sent to its pool while it waited; None where it did not wait."""
        if not receipt.waited.causes or not receipt.pool:
            return None
        before = self._dispatches + 1 if receipt.ended_waiting else receipt.attempts[-1].number
        counts: Counter[tuple[str, str]] = Counter()
        for number, attempt in enumerate(self._attempts_since(receipt.came_at), start=1):
            if number % _LOOKED_AT == 0:
                # Others have waited long enough for this look.
                await asyncio.sleep(0)
            if (
                attempt.at >= receipt.came_at
                and attempt.number < before
                and attempt.at <= receipt.ended_at
                and attempt.dispatch.pool == receipt.pool
                and attempt.dispatch.request_id != receipt.conclude.request_id
            ):
                counts[attempt.priority, attempt.tenant] += 1
        named = counts.most_common(MOST_SERVED)
        return {
            "pool": receipt.pool,
            "requests": counts.total(),
            "by": [
                {"class": priority, "tenant": tenant, "requests": count}
                for (priority, tenant), count in named
            ],
            "others": counts.total() - sum(count for _, count in named),
            "is_complete": self._known_since <= receipt.came_at,
        }

    def _attempts_since(self, since: float) -> Iterator[Attempt]:
        """Of all requests that had not ended by then, as they stand now."""
        # Copies: more may end while somebody looks at these.
        running, kept = tuple(self._running.values()), tuple(self._kept)
        return _attempts(running, kept, since)

    def _forget(self, receipt: Receipt) -> None:
        self._known_since = receipt.ended_at
        for name in _names(receipt):
            if self._by_id.get(name) is receipt:
                del self._by_id[name]


def _attempts(
    running: Iterable[tuple[Attempt, ...]], kept: Sequence[Receipt], since: float
) -> Iterator[Attempt]:
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
