"""Answers of the Responses API: one message, whole or as a sequence of typed events."""

from typing import Any

from serve_app.engines.emulated.answers.completions import AnswerHead, encode


class ResponsesAnswer:
    """An answer of `/v1/responses`."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._item_id = f"msg_{head.request_id}"
        self._events = 0
        # Everything of a text delta but its text and its number.
        delta = {"type": "response.output_text.delta", **self._place(), "logprobs": []}
        self._delta = b"event: response.output_text.delta\ndata: " + encode(delta).removesuffix(b"}")

    def announcement(self) -> bytes:
        """The events that say that the response is being worked on: vLLM sends them before the prefill."""
        running = self._response("in_progress", [], usage=False)
        return b"".join(
            (
                self._event("response.created", response=running),
                self._event("response.in_progress", response=running),
            )
        )

    def opening(self) -> bytes:
        """The events up to the empty content part."""
        return b"".join(
            (
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
                self._event("response.content_part.added", **self._place(), part=_part("", [])),
            )
        )

    # `EmulatedAnswer` marks the last token; here the end is an event of its own.
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """One text delta."""
        number = self._number()
        return b'%s,"delta":"%s","sequence_number":%d}\n\n' % (
            self._delta,
            self._head.text(choice, start, count),
            number,
        )

    def ending(self) -> bytes:
        """The whole text, part, item and response, each in the event that completes it."""
        text, logprobs = self._whole_text(), self._whole_logprobs()
        (item,) = self._output()
        return b"".join(
            (
                self._event("response.output_text.done", **self._place(), text=text, logprobs=logprobs),
                self._event("response.content_part.done", **self._place(), part=_part(text, logprobs)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._completion(),
            )
        )

    def whole(self) -> bytes:
        """A response object."""
        return encode(self._response(self._status, self._output(), usage=True))

    def _completion(self) -> bytes:
        last = "response.completed" if self._status == "completed" else "response.incomplete"
        return self._event(last, response=self._response(self._status, self._output(), usage=True))

    def _output(self) -> list[dict[str, Any]]:
        """The items of a finished response."""
        return [self._item(self._status, [_part(self._whole_text(), self._whole_logprobs())])]

    def _whole_text(self) -> str:
        return self._head.whole_text(0)

    def _whole_logprobs(self) -> list[dict[str, Any]]:
        return []

    @property
    def _status(self) -> str:
        return "completed" if self._head.finish_reasons[0] == "stop" else "incomplete"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _number(self) -> int:
        self._events += 1
        return self._events - 1

    def _event(self, kind: str, **content: Any) -> bytes:
        data = encode({"type": kind, **content, "sequence_number": self._number()})
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _response(self, status: str, output: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]:
        head = self._head
        counts = {
            "input_tokens": head.prompt_tokens,
            "input_tokens_details": {"cached_tokens": head.cached_tokens},
            "output_tokens": head.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": head.prompt_tokens + head.output_tokens,
        }
        return {
            "id": head.request_id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": None,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "usage": counts if usage else None,
        }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
