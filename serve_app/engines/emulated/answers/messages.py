"""Anthropic's messages: one block of text, or one call of a tool, whole or as a sequence of typed events.

As in vLLM, the message begins with its first token, and the counts stand in its first and last events.
"""

from typing import Any

import msgspec

from serve_app.engines.emulated.answers.completions import AnswerHead, encode
from serve_app.engines.emulated.answers.scripted import ScriptedHead
from serve_app.engines.emulated.content.spec import ToolCall


class MessageAnswer:
    """An answer of `/v1/messages`: text."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def announcement(self) -> bytes:
        """Nothing: the stream begins with the first token."""
        return b""

    def opening(self) -> bytes:
        """The message without content, and its block of text."""
        return self._message_start() + self._block_start({"type": "text", "text": ""})

    # `EmulatedAnswer` marks the last token; here the end is an event of its own.
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """One text delta."""
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"%s"},"index":0}\n\n'
            % self._head.text(choice, start, count)
        )

    def ending(self) -> bytes:
        """The end of the block, why the message ended, and the end of the message."""
        return self._block_stop() + self._message_end()

    def whole(self) -> bytes:
        """A message object."""
        content = self._content()
        return encode(self._message(content, *self._reason(), self._usage()))

    def _content(self) -> list[dict[str, Any]]:
        return [{"type": "text", "text": self._head.whole_text(0)}]

    def _reason(self) -> tuple[str, str | None]:
        """Why it ended, and the stop string that ended it."""
        return "max_tokens" if self._head.finish_reasons[0] == "length" else "end_turn", None

    def _usage(self) -> dict[str, int]:
        """Anthropic counts cached tokens beside the others."""
        head = self._head
        return {
            "input_tokens": head.prompt_tokens - head.cached_tokens,
            "output_tokens": head.output_tokens,
            "cache_read_input_tokens": head.cached_tokens,
        }

    def _message_start(self) -> bytes:
        usage = {**self._usage(), "output_tokens": 0}
        return _event("message_start", message=self._message([], None, None, usage))

    def _block_start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", content_block=block, index=0)

    def _block_stop(self) -> bytes:
        return _event("content_block_stop", index=0)

    def _message_end(self) -> bytes:
        reason, stop = self._reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._head.request_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._head.model,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


class ScriptedMessage(MessageAnswer):
    """Text that the request prescribes."""

    def __init__(self, scripted: ScriptedHead) -> None:
        super().__init__(scripted.head)
        self._script = scripted.scripts[0]

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """One text delta; none for tokens that the client does not see."""
        text = self._script.text[self._script.sent(start) : self._script.sent(start + count)]
        return _delta({"type": "text_delta", "text": text}) if text else b""

    def _content(self) -> list[dict[str, Any]]:
        return [{"type": "text", "text": self._script.text}]

    def _reason(self) -> tuple[str, str | None]:
        if self._script.finish_reason == "length":
            return "max_tokens", None
        stop = self._script.stop_reason
        return ("end_turn", None) if stop is None else ("stop_sequence", stop)


class MessageCall(ScriptedMessage):
    """A call of a tool."""

    def __init__(self, scripted: ScriptedHead, call: ToolCall) -> None:
        super().__init__(scripted)
        self._scripted = scripted
        self._block = {"type": "tool_use", "id": f"chatcmpl-tool-{scripted.call_id(0)}", "name": call.name}
        self._called = False

    def opening(self) -> bytes:
        """The message without content; its block begins with the arguments."""
        return self._message_start()

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """What some tokens add to the arguments."""
        added = self._scripted.arguments(0, start, count)
        if added is None:
            return b""
        text, is_first = added
        self._called = True
        begin = self._block_start({**self._block, "input": {}}) if is_first else b""
        return begin + _delta({"type": "input_json_delta", "partial_json": text})

    def ending(self) -> bytes:
        """The end of the block, if it began, and of the message."""
        return (self._block_stop() if self._called else b"") + self._message_end()

    def _content(self) -> list[dict[str, Any]]:
        """As in vLLM, a call that is cut is text."""
        script = self._script
        if not script.is_whole or script.arguments is None:
            return super()._content()
        begin, end = script.arguments
        return [{**self._block, "input": msgspec.json.decode(script.text[begin:end])}]

    def _reason(self) -> tuple[str, str | None]:
        reason, stop = super()._reason()
        return ("tool_use", None) if self._script.is_whole else (reason, stop)


def scripted_message(scripted: ScriptedHead) -> MessageAnswer:
    """The answer that the request asks for."""
    call = scripted.spec.call
    return ScriptedMessage(scripted) if call is None else MessageCall(scripted, call)


def _delta(delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", delta=delta, index=0)


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **content}))
