"""Anthropic's Messages API as vLLM serves it: formats answers as messages or events.

As in vLLM, a message begins with its first token, and its first and last events have the token counts.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from serve_app.engines.emulated.completions import AnswerContent, EmulatedAnswer
from serve_app.engines.emulated.http import ApiError, Call, encode, engine_failed

# Anthropic's schema requires these fields; vLLM omits them.
_NO_USAGE = ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier")


class MessageAnswer(EmulatedAnswer):
    """Answer of `/v1/messages`: one block with text or with a tool call."""

    def __init__(self, answer: AnswerContent) -> None:
        super().__init__(answer)
        self._block: dict[str, Any] = {"type": "text", "text": "", "citations": None}
        if answer.call is not None:
            call_id = f"chatcmpl-tool-{answer.request_id}"
            called = {"name": answer.call, "input": {}, "caller": {"type": "direct"}}
            self._block = {"type": "tool_use", "id": call_id, **called}

    def first_token_events(self) -> bytes:
        """Return the start events of the message and its block."""
        message = self._message([], None, {**self._usage(), "output_tokens": 0})
        start = _event("message_start", message=message)
        return start + _event("content_block_start", content_block=self._block, index=0)

    # `ends` is unused: `final_events` sends the end as separate events.
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """Return the text of some tokens as a delta."""
        text = self._answer.outputs[choice].added(start, count)
        delta = {"type": "text_delta", "text": text}
        if self._answer.call is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", delta=delta, index=0)

    def final_events(self) -> bytes:
        """Return the end of the block, the stop reason, and the end of the message."""
        end = _event("content_block_stop", index=0)
        stop = _event("message_delta", delta=_stop(self._reason()), usage=self._usage())
        return end + stop + _event("message_stop")

    def full_body(self) -> bytes:
        """Return a message object."""
        text = self._answer.outputs[0].text
        more = {"text": text} if self._answer.call is None else {"input": msgspec.json.decode(text)}
        return encode(self._message([{**self._block, **more}], self._reason(), self._usage()))

    def _reason(self) -> str:
        if self._answer.call is not None:
            return "tool_use"
        return "max_tokens" if self._answer.outputs[0].finish_reason == "length" else "end_turn"

    def _usage(self) -> dict[str, int | None]:
        """Return Anthropic's usage object, in which `input_tokens` excludes cached tokens."""
        answer = self._answer
        return {
            "input_tokens": answer.prompt_tokens - answer.cached_tokens,
            "output_tokens": answer.output_tokens,
            "cache_read_input_tokens": answer.cached_tokens,
            "cache_creation_input_tokens": 0,
            **dict.fromkeys(_NO_USAGE),
        }

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, usage: dict[str, int | None]
    ) -> dict[str, Any]:
        return {
            "id": self._answer.request_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._answer.model,
            **_stop(reason),
            "usage": usage,
        }


def _stop(reason: str | None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": None, "stop_details": None, "container": None}


def failed_event() -> bytes:
    """Return the event that ends a stream whose engine has failed."""
    return b"event: error\ndata: %s\n\n" % _error(engine_failed())


def anthropic_errors(handler: Callable[[Call], Awaitable[None]]) -> Callable[[Call], Awaitable[None]]:
    """Wrap a handler so that its errors have Anthropic's shape, as vLLM's route does."""

    async def answered(call: Call) -> None:
        try:
            await handler(call)
        except ApiError as error:
            error.body = _error(error)
            raise

    return answered


def _error(error: ApiError) -> bytes:
    return encode({"type": "error", "error": {"type": error.kind, "message": str(error)}})


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **content}))
