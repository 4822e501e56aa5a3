"""Receipts: where the time of each request went, for those that ended in the last ten minutes.

The scheduler knows why a request waited, its gateway how long everything else took. The gateway tells that
with the request's end, so a receipt is whole here, whichever gateway is asked for it. Times of the gateway
and of the scheduler are differences on one clock each, so no clocks are compared.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from serve_app.request import Request, Submission, Usage
from serve_app.scheduling.commands import Conclude, Dispatch
from serve_app.scheduling.request import ScheduledRequest
from serve_app.scheduling.waits.causes import WaitBreakdown
from serve_app.serving.channel.requests.request_book import GatewayRequest
from serve_app.serving.channel.scheduler_client import RequestTimes

KEPT_S = 600.0
# About 30 MB.
MOST_KEPT = 20_000
_NO_BREAKDOWN = WaitBreakdown()


@dataclass(frozen=True, slots=True)
class DispatchAttempt:
    """One dispatch of a request.

    Attributes:
        at: on the scheduler's clock.
        prefill_s: how long its prefill takes an engine that does nothing else, as learned.
        predicted_wait_s: of its whole wait, made when it arrived.
    """

    at: float
    dispatch: Dispatch
    pools: tuple[str, ...]
    prompt_tokens: int
    prefill_tokens: int
    output_tokens: float
    prefill_s: float
    predicted_wait_s: float | None


@dataclass(frozen=True, slots=True)
class AskedRequest:
    """What a request asked for, which a replay needs.

    Attributes:
        submission: without the hashes of its prompt.
        arrived_at, expires_at: on the scheduler's clock.
    """

    submission: Submission
    arrived_at: float
    expires_at: float

    @classmethod
    def of(cls, request: Request) -> Self:
        """What is kept of a request."""
        submission = request.submission
        if submission.prefix:
            submission = replace(submission, prefix=())
        return cls(submission, request.arrived_at, request.expires_at)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is kept of one request.

    Attributes:
        ended_at: on the scheduler's clock.
        arrived_at: in seconds since 1970.
        asked: None where another scheduler has admitted it.
    """

    ended_at: float
    arrived_at: float
    conclude: Conclude
    model: str
    tenant: str
    priority: str
    asked: "AskedRequest | None"
    attempts: tuple[DispatchAttempt, ...]
    usage: Usage | None
    times: RequestTimes | None

    @property
    def waited(self) -> WaitBreakdown:
        """What it waited for."""
        told = self.conclude.waited
        if told is None and self.attempts:
            told = self.attempts[-1].dispatch.waited
        return told or _NO_BREAKDOWN

    @property
    def wait_s(self) -> float:
        """From its arrival at the scheduler to its last dispatch, or to its end in the queue."""
        if self.conclude.waited is None and self.attempts:
            return self.attempts[-1].dispatch.queue_wait_s
        return self.waited.wait_s

    def document(self) -> dict[str, Any]:
        """The receipt for people and programs; times are milliseconds."""
        waited, times = self.waited, self.times
        return {
            "request_id": self.conclude.request_id,
            "client_request_id": times.client_request_id if times is not None else None,
            "endpoint": times.endpoint if times is not None else None,
            "model": self.model,
            "tenant": self.tenant,
            "class": self.priority,
            "outcome": self.conclude.conclusion.outcome.value,
            "message": self.conclude.conclusion.message,
            "arrived_at": self.arrived_at,
            "stages": [{"stage": name, "ms": _ms(seconds)} for name, seconds in self._stages()],
            "queue": {
                "ms": _ms(self.wait_s),
                "predicted_ms": _ms(self.attempts[0].predicted_wait_s) if self.attempts else None,
                "causes": [
                    {"cause": cause.value, "ms": nanoseconds / 1e6, "meaning": cause.meaning}
                    for cause, nanoseconds in waited.causes.items()
                ],
                "ahead": {cause.value: count for cause, count in waited.ahead.items()},
            },
            "attempts": [_attempt(each, self.attempts[0]) for each in self.attempts],
            "tokens": self._tokens(),
        }

    def _stages(self) -> Iterator[tuple[str, float | None]]:
        """The parts of its time, in their order; together they are the time from its arrival to its end."""
        times = self.times
        if times is None:
            yield "queue", self.wait_s
            return
        yield "gateway", times.read_s
        yield "channel", times.grant_s - self.wait_s
        yield "queue", self.wait_s
        if times.first_token_s is None:
            yield "engine", times.engine_s
        else:
            yield "until_first_token", times.first_token_s
            yield "generation", times.engine_s - times.first_token_s

    def _tokens(self) -> dict[str, float | None]:
        last, usage = (self.attempts[-1] if self.attempts else None), self.usage
        return {
            "budget": last.dispatch.estimated_tokens if last is not None else None,
            "expected_prompt": last.prompt_tokens if last is not None else None,
            "expected_output": last.output_tokens if last is not None else None,
            "to_prefill": last.prefill_tokens if last is not None else None,
            "prompt": usage.prompt_tokens if usage is not None else None,
            "cached": usage.cached_tokens if usage is not None else None,
            "output": usage.output_tokens if usage is not None else None,
        }


class ReceiptBook:
    """The receipts of one scheduler.

    Args:
        prefill_s: how long a prefill takes in a pool, by its tokens, as learned so far.
        most: how many are kept at once.
    """

    def __init__(self, prefill_s: Callable[[str, int], float], most: int = MOST_KEPT) -> None:
        self._prefill_s = prefill_s
        self._most = most
        self._running: dict[str, tuple[DispatchAttempt, ...]] = {}
        self._asked: dict[str, AskedRequest] = {}
        self._kept: deque[Receipt] = deque()
        self._by_id: dict[str, Receipt] = {}

    def __repr__(self) -> str:
        return f"<ReceiptBook {len(self._kept)} kept, {len(self._running)} under way>"

    def on_arrival(self, request: Request) -> None:
        """A request has come, whatever becomes of it."""
        self._asked[request.request_id] = AskedRequest.of(request)

    def on_dispatch(self, command: Dispatch, scheduled: ScheduledRequest, now: float) -> None:
        """A request was sent to a replica."""
        estimate, prediction = scheduled.estimate, scheduled.prediction
        prefill_tokens = scheduled.prefill_tokens
        attempt = DispatchAttempt(
            now,
            command,
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
        receipt = Receipt(
            ended_at=now,
            arrived_at=time.time() - (now - record.arrived_at),
            conclude=command,
            model=record.model,
            tenant=record.tenant,
            priority=record.priority.value,
            asked=self._asked.pop(command.request_id, None),
            attempts=attempts,
            usage=record.usage,
            times=record.times,
        )
        self._kept.append(receipt)
        for name in _names(receipt):
            self._by_id[name] = receipt
        while len(self._kept) > self._most or self._kept[0].ended_at < now - KEPT_S:
            self._forget(self._kept.popleft())

    def under_way(self) -> Iterator[tuple[AskedRequest, tuple[DispatchAttempt, ...]]]:
        """Every request that has not ended, with its dispatches."""
        for request_id, asked in self._asked.items():
            yield asked, self._running.get(request_id, ())

    def find(self, request_id: str) -> Receipt | None:
        """The receipt of a request by its own id, or by the last request's to which a client gave that id."""
        return self._by_id.get(request_id)

    def __iter__(self) -> Iterator[Receipt]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _forget(self, receipt: Receipt) -> None:
        for name in _names(receipt):
            if self._by_id.get(name) is receipt:
                del self._by_id[name]


def _names(receipt: Receipt) -> set[str]:
    """The ids that a receipt is found by."""
    own = receipt.conclude.request_id
    return {own} if receipt.times is None else {own, receipt.times.client_request_id}


def _attempt(attempt: DispatchAttempt, first: DispatchAttempt) -> dict[str, Any]:
    dispatch = attempt.dispatch
    return {
        "after_first_ms": _ms(attempt.at - first.at),
        "pool": dispatch.pool,
        "home_pool": attempt.pools[0] if attempt.pools else None,
        "replica": dispatch.replica_id,
        "length_queue": dispatch.length_queue,
        "engine_priority": dispatch.engine_priority,
        "passed": dispatch.passed,
        "expected_prefill_ms": _ms(attempt.prefill_s),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
