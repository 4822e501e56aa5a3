"""Outcome of a streamed request, parsed from the bytes of its response as they arrive.

Each event is decoded until the first generated token. Afterwards only the last bytes are parsed, which have
the usage, an error and the end marker. A response counts as completed only with a complete HTTP message,
status 200, `[DONE]`, and no error in the body. Times are from `time.monotonic`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.errors import HTTP_STATUS, Outcome

# Enough for the last events (usage, error, end marker). An engine's error message may be long.
_TAIL_BYTES = 8192
# Maximum bytes buffered of a response with another status.
_WHOLE_BYTES = 16 * 1024 * 1024

_OUTCOME_OF_CODE = {
    "context_length_exceeded": Outcome.REJECTED_TOO_LONG,
    "queue_full": Outcome.REJECTED_QUEUE_FULL,
    "deadline_unmeetable": Outcome.REJECTED_DEADLINE_UNMEETABLE,
    "rate_limit_exceeded": Outcome.REJECTED_RATE_LIMITED,
    "no_replica": Outcome.REJECTED_NO_REPLICA,
    "queue_timeout": Outcome.EXPIRED,
    "model_not_found": Outcome.REJECTED_UNKNOWN_MODEL,
}
# If several outcomes have the same status, the first one applies.
_OUTCOME_OF_STATUS = {status: outcome for outcome, status in reversed(HTTP_STATUS.items())}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _UsageCounts(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str | None = None
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _UsageCounts | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class ResponseParser:
    """A response while it arrives.

    Attributes:
        status: HTTP status, 0 before it is known.
        headers: the response's, looked up in any case.
        first_token_at: arrival of the first generated token.
        finished_at: end of the response.
        prompt_tokens, cached_tokens, output_tokens: the engine's counts; None if not reported.
        outcome: None until the end.
        detail: the reason if it did not complete.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    first_token_at: float | None = None
    finished_at: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    outcome: Outcome | None = None
    detail: str = ""
    _bytes: bytes = b""

    def on_body(self, piece: bytes, now: float) -> None:
        """Process bytes of the body."""
        if self.status != 200:
            self._bytes = (self._bytes + piece)[:_WHOLE_BYTES]
        elif self.first_token_at is not None:
            self._bytes = (self._bytes + piece)[-_TAIL_BYTES:]
        else:
            self._bytes += piece
            if self._has_token():
                self.first_token_at = now
                self._bytes = self._bytes[-_TAIL_BYTES:]

    def on_complete(self, now: float) -> None:
        """Process the end of the HTTP message."""
        if self.status != 200:
            self._rejected(now)
        else:
            self._stream_ended(now)

    def fail(self, detail: str, now: float, outcome: Outcome = Outcome.FAILED) -> None:
        """End the response as not completed. Only the first end counts."""
        self._end(outcome, now, detail)

    def _has_token(self) -> bool:
        """Return whether a complete event has generated text.

        Parsed events are dropped, except for the last one, which may be the end marker, and an error.
        """
        *events, rest = self._bytes.replace(b"\r\n", b"\n").split(b"\n\n")
        for position, raw in enumerate(events):
            event = _event(raw)
            self._note_usage(event)
            if event.error is not None or _carries_token(event):
                self._bytes = b"\n\n".join((*events[position:], rest))
                return event.error is None
        self._bytes = b"\n\n".join((*events[-1:], rest))
        return False

    def _rejected(self, now: float) -> None:
        error = _event(b"data: " + self._bytes).error
        code = str(error.code or error.type or "") if error is not None else ""
        outcome = _OUTCOME_OF_CODE.get(code) or _OUTCOME_OF_STATUS.get(self.status, Outcome.FAILED)
        message = (error.message if error is not None else None) or self._bytes[:200].decode(
            "utf-8", "replace"
        )
        self._end(outcome, now, f"HTTP {self.status} {code}: {message}")

    def _stream_ended(self, now: float) -> None:
        *events, rest = self._bytes.replace(b"\r\n", b"\n").split(b"\n\n")
        for raw in events:
            event = _event(raw)
            self._note_usage(event)
            if event.error is not None:
                self._end(Outcome.FAILED, now, f"error in the stream: {event.error.message}")
                return
        if not events or events[-1].strip() != b"data: [DONE]":
            self._end(Outcome.FAILED, now, f"the stream ended without [DONE] after {rest[-80:]!r}")
            return
        self._end(Outcome.COMPLETED, now)

    def _note_usage(self, event: _Event) -> None:
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self.output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                self.cached_tokens = event.usage.prompt_tokens_details.cached_tokens

    def _end(self, outcome: Outcome, now: float, detail: str = "") -> None:
        if self.outcome is None:
            self.outcome, self.finished_at, self.detail = outcome, now, detail[:500]
            self._bytes = b""


def _event(raw: bytes) -> _Event:
    """Decode a server-sent event; return an empty one if it is not a JSON object of the expected form."""
    data = raw.strip().removeprefix(b"data:").strip()
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _NOTHING


_NOTHING = _Event()


def _carries_token(event: _Event) -> bool:
    for choice in event.choices:
        delta: Any = choice.delta
        if choice.text or (
            delta is not None
            and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)
        ):
            return True
    return False
