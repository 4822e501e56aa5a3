"""When the parts of one request's service began and ended, and what is told of that."""

from typing import Any

from serve_app.scheduling.commands import Dispatch
from serve_app.serving.channel.scheduler_client import EngineTimes, RequestTimes
from serve_app.serving.gateway.answer.responses import HeaderList, encode
from serve_app.serving.gateway.request.headers import RECEIPT_HEADER


class CallTimes:
    """The times of one request, in seconds on the monotonic clock.

    Attributes:
        arrived_at: its head was read.
        asked_at: the scheduler was asked for a place.
        granted_at: the last place was granted; None while there was none.
        first_token_at: the answer began; None for one that is not streamed.
        ended_at: it was over in the engine, or in the queue; None while it is not.
        engine: what the engine tells of the time inside it; None where it does not.
    """

    __slots__ = ("arrived_at", "asked_at", "ended_at", "engine", "first_token_at", "granted_at")

    def __init__(self, arrived_at: float) -> None:
        self.arrived_at = self.asked_at = arrived_at
        self.granted_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.engine: EngineTimes | None = None

    def told(self, endpoint: str, now: float, *, granted: bool) -> RequestTimes:
        """What the scheduler is told at its end, which is now.

        Args:
            granted: it ended by a grant, and not in the queue.
        """
        self.ended_at = now
        granted_at = self.granted_at if granted else None
        return self._times(endpoint, granted_at, now if granted_at is None else granted_at)

    def receipt_header(self, dispatch: Dispatch) -> HeaderList:
        """What a client is told that asks with `x-ewsjf-receipt: 1`, as far as it is known by now."""
        return [(RECEIPT_HEADER, encode(self._receipt(dispatch)))]

    def receipt_comment(self, dispatch: Dispatch) -> bytes:
        """The same as a comment at the end of an event stream."""
        return b": " + RECEIPT_HEADER[2:] + b" " + encode(self._receipt(dispatch)) + b"\n\n"

    def _receipt(self, dispatch: Dispatch) -> dict[str, Any]:
        waited, engine = dispatch.waited, self.engine
        inside = {} if engine is None else {"engine_ms": _told(engine)}
        return {
            "wait_ms": round(dispatch.queue_wait_s * 1e3, 3),
            "causes_ms": {} if waited is None else {cause: ns / 1e6 for cause, ns in waited.causes.items()},
            "ahead": {} if waited is None else waited.ahead,
            "stages_ms": {} if self.granted_at is None else self._stages_ms(self.granted_at, dispatch),
            **inside,
        }

    def _stages_ms(self, granted_at: float, dispatch: Dispatch) -> dict[str, float]:
        """The stages that are over, as a receipt of the scheduler names them."""
        stages = self._times("", granted_at, granted_at).stages(dispatch.queue_wait_s)
        return {name: round(seconds * 1e3, 3) for name, seconds in stages}

    def _times(self, endpoint: str, granted_at: float | None, waited_until: float) -> RequestTimes:
        """What is known by now.

        Args:
            granted_at: when it was granted the place that it ended by; None for none.
        """
        first_at, ended_at = self.first_token_at, self.ended_at
        return RequestTimes(
            endpoint,
            self.asked_at - self.arrived_at,
            waited_until - self.asked_at,
            None if first_at is None or granted_at is None else first_at - granted_at,
            None if ended_at is None or granted_at is None else ended_at - granted_at,
            self.engine,
        )


def _told(engine: EngineTimes) -> dict[str, float]:
    """What the engine has told, in milliseconds."""
    named = {"queue": engine.queue_s, "prefill": engine.prefill_s, "generation": engine.generation_s}
    return {name: round(seconds * 1e3, 3) for name, seconds in named.items() if seconds is not None}
