"""What is told of a request that has not ended yet: the same as in a receipt, as far as it has come."""

from typing import Any

from serve_app.scheduling import Scheduler
from serve_app.scheduling.outlook.order import expected_order
from serve_app.scheduling.request import ScheduledRequest
from serve_app.scheduling.waits.accounts import wait_so_far, waits_for
from serve_app.scheduling.waits.causes import WaitBreakdown
from serve_app.serving.channel.requests.request_book import GatewayRequest, RequestBook
from serve_app.serving.in_parts import in_parts
from serve_app.serving.scheduler.queue_watch import QueueWatch
from serve_app.serving.scheduler.receipts.book import ReceiptBook
from serve_app.serving.scheduler.receipts.receipt import queue_figures
from serve_app.serving.scheduler.receipts.served import WaitedFor
from serve_app.serving.scheduler.receipts.stages import in_ms, stage


class RequestLookup:
    """Finds what a scheduler knows of a request, whether it has ended or not.

    Args:
        outlook: estimates when one that waits will start.
    """

    def __init__(
        self, core: Scheduler, book: RequestBook, receipts: ReceiptBook, outlook: QueueWatch
    ) -> None:
        self._core = core
        self._book = book
        self._receipts = receipts
        self._outlook = outlook

    def __repr__(self) -> str:
        return f"<RequestLookup {self._book}, {self._receipts}>"

    async def document(self, request_id: str, now: float, at: float) -> dict[str, Any]:
        """What is known of the request with that id, its own or its client's; empty where there is none.

        Args:
            now: on the scheduler's clock.
            at: the same moment in seconds since 1970.
        """
        ended = self._receipts.find(request_id)
        if ended is None or ended.conclude.request_id != request_id:
            own_id = self._own_id(request_id)
            scheduled = self._core.find(own_id)
            if scheduled is not None:
                record = self._book[own_id]
                told = await self._under_way(scheduled, record, now)
                return {**told, "arrived_at": at - (now - record.arrived_at)}
        return {} if ended is None else await self._receipts.document(ended)

    def _own_id(self, request_id: str) -> str:
        """Of several requests with one client's id the last counts."""
        if request_id in self._book:
            return request_id
        named = (
            own for own, record in reversed(self._book.items()) if record.client_request_id == request_id
        )
        return next(named, "")

    async def _under_way(
        self, scheduled: ScheduledRequest, record: GatewayRequest, now: float
    ) -> dict[str, Any]:
        request, attempts = scheduled.request, self._receipts.attempts_of(scheduled.request.request_id)
        waits, predicted = scheduled.queued, scheduled.prediction
        predicted_s = predicted.wait_s if predicted is not None else None
        if waits or not attempts:
            waited, wait_s = wait_so_far(scheduled, now), now - request.arrived_at
            pool, until, before = scheduled.pools[0], now, self._receipts.dispatches + 1
        else:
            last = attempts[-1]
            waited, wait_s = last.dispatch.waited or WaitBreakdown(), last.dispatch.queue_wait_s
            pool, until, before = last.dispatch.pool, last.at, last.number
        wait = WaitedFor(
            request_id=request.request_id, pool=pool, since=request.arrived_at, until=until, before=before
        )
        # First, while it stands as it did: others go on between the parts of these looks.
        place = await self._place(scheduled, now) if waits else {}
        served = await self._receipts.served(wait) if waited.causes else None
        return {
            "request_id": request.request_id,
            "client_request_id": record.client_request_id or request.request_id,
            "endpoint": None,
            "model": record.model,
            "tenant": request.tenant,
            "class": request.priority.value,
            "outcome": None,
            "state": "waiting" if waits else "running",
            "message": "",
            "stages": _stages_so_far(scheduled, wait_s, now),
            "queue": {
                **queue_figures(waited, wait_s, predicted_s, served),
                **place,
            },
            "attempts": [each.described(attempts[0]) for each in attempts],
            "tokens": {
                "budget": scheduled.estimate.budget_tokens,
                "expected_prompt": scheduled.estimate.expected_prompt_tokens,
                "expected_output": scheduled.estimate.expected_output_tokens,
                "to_prefill": scheduled.prefill_tokens,
                "prompt": None,
                "cached": None,
                "output": None,
            },
        }

    async def _place(self, scheduled: ScheduledRequest, now: float) -> dict[str, Any]:
        """How a request stands that waits now."""
        cause, obstacles = waits_for(scheduled), self._core.dispatcher.why_waiting(scheduled, now)
        home, core = scheduled.pools[0], self._core
        orders = await in_parts(expected_order(core.queue, core.settings.class_floors, now))
        order = orders.get(home, ())
        outlook = self._outlook.expected(scheduled, order, now)
        start = outlook.start if outlook is not None else None
        return {
            "waits_for": cause.value,
            "meaning": cause.meaning,
            "obstacles": obstacles,
            "length_queue": scheduled.length_queue,
            "pool": home,
            "position": outlook.position if outlook is not None else None,
            "waiting": len(order),
            "expected_ms": in_ms(start.middle) if start is not None else None,
            "expected_between_ms": [in_ms(start.low), in_ms(start.high)] if start is not None else None,
            "expires_in_ms": in_ms(scheduled.expires_at - now),
        }


def _stages_so_far(scheduled: ScheduledRequest, wait_s: float, now: float) -> list[dict[str, Any]]:
    """As the scheduler sees them: what is at the gateway is not told before the end."""
    told = [stage("queue", wait_s)]
    if scheduled.queued:
        return told
    started_at = scheduled.started_at
    if started_at is None:
        told.append(
            stage("engine" if scheduled.started else "until_first_token", now - scheduled.dispatched_at)
        )
    else:
        told.append(stage("until_first_token", started_at - scheduled.dispatched_at))
        told.append(stage("generation", now - started_at))
    return told
