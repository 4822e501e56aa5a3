"""Chat and text completions whose text the request prescribes: tool calls, logprobs, stop strings, echo.

They cost more per token than plain answers, which is why those are written by `answers`.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from serve_app.engines.emulated.answers.completions import DONE, AnswerHead, common, encode
from serve_app.engines.emulated.content.logprobs import chat_entries, completion_logprobs
from serve_app.engines.emulated.content.script import Script
from serve_app.engines.emulated.content.spec import CallForm, OutputSpec, ToolCall


@dataclass(frozen=True, slots=True)
class ScriptedHead:
    """What the parts of a scripted answer need.

    Attributes:
        head: as of a plain answer.
        spec: what the request asked for.
        scripts: one per choice.
    """

    head: AnswerHead
    spec: OutputSpec
    scripts: tuple[Script, ...]

    def seed(self, choice: int) -> int:
        """Seed of a choice's logprobs."""
        return self.spec.seed + choice

    def arguments(self, choice: int, start: int, count: int) -> tuple[str, bool] | None:
        """What some tokens add to the arguments of a tool call, and whether they are the first that do."""
        script = self.scripts[choice]
        if script.arguments is None:
            return None
        begin, end = script.arguments
        before, after = script.sent(start), script.sent(start + count)
        if after <= begin or before >= end:
            return None
        return script.text[max(before, begin) : min(after, end)], before <= begin

    def call_id(self, choice: int) -> str:
        """Hexadecimal digits that tell a call from all others."""
        name = f"{self.head.request_id}/{choice}"
        return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()


class ScriptedChat:
    """An answer of `/v1/chat/completions`."""

    def __init__(self, scripted: ScriptedHead) -> None:
        self._scripted = scripted
        self._head = scripted.head
        self._chunks = _Chunks(scripted, "chat.completion.chunk")

    def announcement(self) -> bytes:
        """Nothing: the stream begins with the first token."""
        return b""

    def opening(self) -> bytes:
        """The role, once per choice."""
        choices = range(len(self._scripted.scripts))
        return b"".join(
            self._chunks.chunk(
                {
                    "index": choice,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                },
                tokens=0,
            )
            for choice in choices
        )

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """One chunk; none for tokens that the client does not see."""
        logprobs = self._logprobs(choice, start, count)
        delta = self._delta(choice, start, count)
        if delta is None and logprobs is None and not ends:
            return b""
        content: dict[str, Any] = {"index": choice, "delta": delta or {}, "logprobs": logprobs}
        content["finish_reason"] = self._finish_reason(choice, streaming=True) if ends else None
        if ends:
            content["stop_reason"] = self._scripted.scripts[choice].stop_reason
        return self._chunks.chunk(content, tokens=start + count)

    def ending(self) -> bytes:
        """The usage, when it was asked for, and the end mark."""
        return self._chunks.ending()

    def whole(self) -> bytes:
        """The object that holds all choices."""
        choices = [
            {
                "index": choice,
                "message": self._message(choice),
                "logprobs": self._logprobs(choice, 0, len(script.tokens)),
                "finish_reason": self._finish_reason(choice, streaming=False),
                "stop_reason": script.stop_reason,
            }
            for choice, script in enumerate(self._scripted.scripts)
        ]
        head = self._head
        return encode({**common(head, "chat.completion"), "choices": choices, "usage": head.usage()})

    def _delta(self, choice: int, start: int, count: int) -> dict[str, Any] | None:
        call = self._scripted.spec.call
        if call is None:
            script = self._scripted.scripts[choice]
            return {"content": script.text[script.sent(start) : script.sent(start + count)]}
        added = self._scripted.arguments(choice, start, count)
        if added is None:
            return None
        text, is_first = added
        if not is_first:
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        return {"tool_calls": [{**self._call(choice, call, text), "index": 0}]}

    def _message(self, choice: int) -> dict[str, Any]:
        script, call = self._scripted.scripts[choice], self._scripted.spec.call
        message: dict[str, Any] = {"role": "assistant", "content": script.text}
        if call is None:
            return message
        # vLLM reads calls out of the finished text: a list that is cut is none, and marks that are cut are
        # text. The arguments of a named tool are handed on as they are.
        if call.form is not CallForm.AUTO:
            message["content"] = ""
        if call.form is CallForm.NAMED and script.text.strip():
            message["tool_calls"] = [self._call(choice, call, script.text)]
        elif call.form is not CallForm.NAMED and script.is_whole and script.arguments is not None:
            begin, end = script.arguments
            message["tool_calls"] = [self._call(choice, call, script.text[begin:end])]
            message["content"] = None if call.form is CallForm.AUTO else ""
        return message

    def _call(self, choice: int, call: ToolCall, arguments: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-tool-{self._scripted.call_id(choice)}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _finish_reason(self, choice: int, *, streaming: bool) -> str:
        """As in vLLM: "tool_calls" after a call that was chosen or required, not after a named one."""
        script, call = self._scripted.scripts[choice], self._scripted.spec.call
        if call is None or call.form is CallForm.NAMED or script.finish_reason != "stop":
            return script.finish_reason
        if call.form is CallForm.REQUIRED and not streaming:
            return "tool_calls"
        called = script.arguments is not None and len(script.text) > script.arguments[0]
        return "tool_calls" if called and (streaming or script.is_whole) else "stop"

    def _logprobs(self, choice: int, start: int, count: int) -> dict[str, Any] | None:
        top = self._scripted.spec.top_logprobs
        if top is None:
            return None
        tokens = self._scripted.scripts[choice].tokens[start : start + count]
        return {"content": chat_entries(self._scripted.seed(choice), start, tokens, top)}


class ScriptedCompletion:
    """An answer of `/v1/completions`."""

    def __init__(self, scripted: ScriptedHead) -> None:
        self._scripted = scripted
        self._head = scripted.head
        self._chunks = _Chunks(scripted, "text_completion")

    def announcement(self) -> bytes:
        """Nothing: the stream begins with the first token."""
        return b""

    def opening(self) -> bytes:
        """Nothing here either."""
        return b""

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """One chunk; the first repeats the prompt when that was asked for."""
        script = self._scripted.scripts[choice]
        text = script.text[script.sent(start) : script.sent(start + count)]
        content = {
            "index": choice,
            "text": text if start else self._echo(choice) + text,
            "logprobs": self._logprobs(choice, start, count),
            "finish_reason": script.finish_reason if ends else None,
            "stop_reason": script.stop_reason if ends else None,
        }
        return self._chunks.chunk(content, tokens=start + count)

    def ending(self) -> bytes:
        """The usage, when it was asked for, and the end mark."""
        return self._chunks.ending()

    def whole(self) -> bytes:
        """The object that holds all choices."""
        choices = [
            {
                "index": choice,
                "text": self._echo(choice) + script.text,
                "logprobs": self._logprobs(choice, 0, len(script.tokens)),
                "finish_reason": script.finish_reason,
                "stop_reason": script.stop_reason,
            }
            for choice, script in enumerate(self._scripted.scripts)
        ]
        head = self._head
        return encode({**common(head, "text_completion"), "choices": choices, "usage": head.usage()})

    def _echo(self, choice: int) -> str:
        echo = self._scripted.spec.echo
        return echo[choice * len(echo) // len(self._scripted.scripts)] if echo else ""

    def _logprobs(self, choice: int, start: int, count: int) -> dict[str, Any] | None:
        top = self._scripted.spec.top_logprobs
        if top is None:
            return None
        script = self._scripted.scripts[choice]
        offset = script.ends[start - 1] if start else 0
        tokens = script.tokens[start : start + count]
        return completion_logprobs(self._scripted.seed(choice), start, tokens, top, offset)


class _Chunks:
    """Events of a stream."""

    def __init__(self, scripted: ScriptedHead, kind: str) -> None:
        self._head = scripted.head
        self._common = common(scripted.head, kind)
        self._continuous = scripted.spec.continuous_usage

    def chunk(self, choice: dict[str, Any], *, tokens: int) -> bytes:
        """One event with one choice, which has so many tokens by now."""
        content: dict[str, Any] = {**self._common, "choices": [choice]}
        if self._continuous and self._head.include_usage:
            prompt = self._head.sequences[choice["index"]].prompt_tokens
            counts = {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}
            content["usage"] = counts
        return b"data: " + encode(content) + b"\n\n"

    def ending(self) -> bytes:
        """The usage, when it was asked for, and the end mark."""
        if not self._head.include_usage:
            return DONE
        usage = encode({**self._common, "choices": [], "usage": self._head.usage()})
        return b"data: " + usage + b"\n\n" + DONE
