"""A receipt: what is kept of one request, and what is told of it."""

from dataclasses import dataclass, replace
from typing import Any, Self

from serve_app.request import Request, Submission, Usage
from serve_app.scheduling.commands import Conclude, Dispatch
from serve_app.scheduling.waits.causes import WaitBreakdown
from serve_app.serving.channel.scheduler_client import RequestTimes
from serve_app.serving.scheduler.receipts.stages import in_ms, stages

_NO_BREAKDOWN = WaitBreakdown()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One dispatch of a request.

    Attributes:
        number: counts all dispatches.
        at: on the scheduler's clock.
        prefill_s: how long its prefill takes an engine that does nothing else, as learned.
        predicted_wait_s: of its whole wait, made when it arrived.
    """

    number: int
    at: float
    dispatch: Dispatch
    tenant: str
    priority: str
    pools: tuple[str, ...]
    prompt_tokens: int
    prefill_tokens: int
    output_tokens: float
    prefill_s: float
    predicted_wait_s: float | None

    def described(self, first: "Attempt") -> dict[str, Any]:
        """The attempt for people and programs; times are milliseconds."""
        dispatch = self.dispatch
        return {
            "after_first_ms": in_ms(self.at - first.at),
            "pool": dispatch.pool,
            "home_pool": self.pools[0] if self.pools else None,
            "replica": dispatch.replica_id,
            "length_queue": dispatch.length_queue,
            "engine_priority": dispatch.engine_priority,
            "passed": dispatch.passed,
            "expected_prefill_ms": in_ms(self.prefill_s),
        }


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


@dataclass(slots=True, eq=False)
class Receipt:
    """What is kept of one request.

    Attributes:
        came_at: when it came in, on the scheduler's clock.
        ended_at: on the scheduler's clock.
        arrived_at: in seconds since 1970.
        pool: whose places it waited for; empty for one that was refused at once.
        asked: None where another scheduler has admitted it.
        times: what its gateway has told; of one that ended in the queue that comes a little later.
        client_request_id: the id that its client gave it; empty for none.
    """

    came_at: float
    ended_at: float
    arrived_at: float
    conclude: Conclude
    model: str
    tenant: str
    priority: str
    pool: str
    asked: AskedRequest | None
    attempts: tuple[Attempt, ...]
    usage: Usage | None
    times: RequestTimes | None
    client_request_id: str

    @property
    def waited(self) -> WaitBreakdown:
        """What it waited for."""
        told = self.conclude.waited
        if told is None and self.attempts:
            told = self.attempts[-1].dispatch.waited
        return told or _NO_BREAKDOWN

    @property
    def ended_waiting(self) -> bool:
        """Whether it ended in the queue."""
        return self.conclude.waited is not None or not self.attempts

    @property
    def wait_s(self) -> float:
        """From its arrival at the scheduler to its last dispatch, or to its end in the queue."""
        return self.waited.wait_s if self.ended_waiting else self.attempts[-1].dispatch.queue_wait_s

    def document(self, served: dict[str, Any] | None = None) -> dict[str, Any]:
        """The receipt for people and programs; times are milliseconds.

        Args:
            served: who was served while it waited.
        """
        waited, times = self.waited, self.times
        last = self.attempts[-1] if self.attempts else None
        prefill_s = last.prefill_s if last is not None else None
        predicted_s = self.attempts[0].predicted_wait_s if self.attempts else None
        return {
            "request_id": self.conclude.request_id,
            "client_request_id": self.client_request_id or self.conclude.request_id,
            "endpoint": times.endpoint if times is not None else None,
            "model": self.model,
            "tenant": self.tenant,
            "class": self.priority,
            "state": "ended",
            "outcome": self.conclude.conclusion.outcome.value,
            "message": self.conclude.conclusion.message,
            "arrived_at": self.arrived_at,
            "stages": stages(times, self.wait_s, prefill_s),
            "queue": queue_figures(waited, self.wait_s, predicted_s, served),
            "attempts": [each.described(self.attempts[0]) for each in self.attempts],
            "tokens": self._tokens(),
        }

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


def queue_figures(
    waited: WaitBreakdown, wait_s: float, predicted_s: float | None, served: dict[str, Any] | None
) -> dict[str, Any]:
    """What is told of a wait; times are milliseconds."""
    return {
        "ms": in_ms(wait_s),
        "predicted_ms": in_ms(predicted_s),
        "causes": [
            {"cause": cause.value, "ms": nanoseconds / 1e6, "meaning": cause.meaning}
            for cause, nanoseconds in waited.causes.items()
        ],
        "ahead": {cause.value: count for cause, count in waited.ahead.items()},
        "served": served,
    }
