"""Answers of the Responses API whose content the request prescribes: a message, or a function call."""

from typing import Any

from serve_app.engines.emulated.answers.responses import ResponsesAnswer
from serve_app.engines.emulated.answers.scripted import ScriptedHead
from serve_app.engines.emulated.content.logprobs import chat_entries
from serve_app.engines.emulated.content.script import Script
from serve_app.engines.emulated.content.spec import ToolCall


class ScriptedText(ResponsesAnswer):
    """A message."""

    def __init__(self, scripted: ScriptedHead) -> None:
        super().__init__(scripted.head)
        self._scripted = scripted
        self._script: Script = scripted.scripts[0]

    # A response has one choice, and its end is an event of its own.
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """One text delta."""
        script = self._script
        text = script.text[script.sent(start) : script.sent(start + count)]
        return self._event(
            "response.output_text.delta",
            **self._place(),
            delta=text,
            logprobs=self._logprobs(start, count),
        )

    def _whole_text(self) -> str:
        return self._script.text

    def _whole_logprobs(self) -> list[dict[str, Any]]:
        return self._logprobs(0, len(self._script.tokens))

    def _logprobs(self, start: int, count: int) -> list[dict[str, Any]]:
        top = self._scripted.spec.top_logprobs
        if top is None:
            return []
        tokens = self._script.tokens[start : start + count]
        return chat_entries(self._scripted.seed(0), start, tokens, top)


class ScriptedCall(ResponsesAnswer):
    """A function call."""

    def __init__(self, scripted: ScriptedHead, call: ToolCall) -> None:
        super().__init__(scripted.head)
        self._scripted = scripted
        self._call = call
        digits = scripted.call_id(0)
        self._ids = {"id": f"fc_{digits}", "call_id": f"call_{digits}"}

    def opening(self) -> bytes:
        """The event of the empty call."""
        item = self._function_call("in_progress", "")
        return self._event("response.output_item.added", output_index=0, item=item)

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """What some tokens add to the arguments."""
        added = self._scripted.arguments(0, start, count)
        if added is None:
            return b""
        place = {"item_id": self._ids["id"], "output_index": 0}
        return self._event("response.function_call_arguments.delta", **place, delta=added[0])

    def ending(self) -> bytes:
        """The whole arguments, item and response, each in the event that completes it."""
        (item,) = self._output()
        place = {"item_id": self._ids["id"], "output_index": 0}
        done = {"arguments": item["arguments"], "name": self._call.name}
        return b"".join(
            (
                self._event("response.function_call_arguments.done", **place, **done),
                self._event("response.output_item.done", output_index=0, item=item),
                self._completion(),
            )
        )

    def _output(self) -> list[dict[str, Any]]:
        script = self._scripted.scripts[0]
        begin, end = script.arguments or (0, 0)
        return [self._function_call(self._status, script.text[begin:end])]

    def _function_call(self, status: str, arguments: str) -> dict[str, Any]:
        item = {"type": "function_call", **self._ids, "name": self._call.name}
        return {**item, "arguments": arguments, "status": status}


def scripted_response(scripted: ScriptedHead) -> ResponsesAnswer:
    """The answer that the request asks for."""
    call = scripted.spec.call
    return ScriptedText(scripted) if call is None else ScriptedCall(scripted, call)
