"""The assembly of a streamed answer into the one object that a client asked for.

A long answer that is not streamed is silent until its end, so a dead engine looks like one at work. Asked for
a stream, the engine is heard with each token, and the gateway puts the pieces together.

What comes out is what the engine would have answered itself, but for what streams do not have: fields that
are null there, and vLLM's `system_fingerprint`. Texts and logprobs of a choice are joined, and of everything
else the last value counts.
"""

from typing import Any

import msgspec

from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.gateway.answer.responses import encode
from serve_app.serving.gateway.upstream.response import UpstreamError

_KINDS = {"chat.completion.chunk": "chat.completion"}
_DONE = b"[DONE]"
_decoder = msgspec.json.Decoder(dict[str, Any])


class _ChoiceParts:
    """One choice while it arrives."""

    def __init__(self, index: int) -> None:
        self._fields: dict[str, Any] = {
            "index": index,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        self._texts: dict[str, list[str]] = {}
        self._message: dict[str, Any] | None = None
        self._logprobs: dict[str, list[Any]] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the engine has said how it ended."""
        return self._fields["finish_reason"] is not None

    def add(self, chunk: dict[str, Any]) -> None:
        """What one event has of this choice."""
        for name, value in chunk.items():
            if value is None:
                continue
            if name == "delta":
                self._add_delta(value)
            elif name == "text":
                self._texts.setdefault(name, []).append(value)
            elif name == "logprobs":
                self._add_logprobs(value)
            else:
                self._fields[name] = value

    def whole(self) -> dict[str, Any]:
        """The choice in one piece."""
        fields = {**self._fields, "logprobs": self._logprobs}
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        if self._message is None:
            return {**fields, "text": texts.get("text", "")}
        content = texts.pop("content", None)
        # After reasoning alone an engine's message has no content, while its stream begins with an empty one.
        message = {"role": "assistant", "content": (content or None) if texts else content}
        return {**fields, "message": {**message, **texts, **self._message}}

    def _add_delta(self, delta: dict[str, Any]) -> None:
        message = self._message = self._message or {}
        for name, value in delta.items():
            if isinstance(value, str) and name != "role":
                self._texts.setdefault(name, []).append(value)
            elif value is not None:
                message[name] = value

    def _add_logprobs(self, logprobs: dict[str, Any]) -> None:
        joined = self._logprobs = self._logprobs or {}
        for name, values in logprobs.items():
            if isinstance(values, list):
                joined.setdefault(name, []).extend(values)


class AnswerAssembly:
    """One chat or text completion while its events arrive."""

    def __init__(self) -> None:
        self._rest = b""
        self._head: dict[str, Any] = {}
        self._usage: Any = None
        self._choices: dict[int, _ChoiceParts] = {}
        # What the engine sent as an error, if it did.
        self.error: bytes | None = None

    def feed(self, events: bytes) -> None:
        """Take the next bytes of the stream.

        Raises:
            UpstreamError: they are no events of a completion.
        """
        *lines, self._rest = (self._rest + events).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data and data != _DONE:
                self._add(data)

    def whole(self) -> bytes:
        """The answer as one JSON object.

        Raises:
            UpstreamError: the stream ended before a choice did.
        """
        choices = [self._choices[index] for index in sorted(self._choices)]
        if not choices or not all(choice.is_complete for choice in choices):
            raise UpstreamError(DispatchFailure.LOST, "the engine ended its stream before its answer")
        return encode({**self._head, "choices": [choice.whole() for choice in choices], "usage": self._usage})

    def _add(self, data: bytes) -> None:
        try:
            chunk = _decoder.decode(data)
            if "error" in chunk and chunk["error"] is not None:
                self.error = data
                return
            self._usage = chunk.pop("usage", None) or self._usage
            for part in chunk.pop("choices", ()):
                index = part["index"]
                choice = self._choices.get(index)
                if choice is None:
                    choice = self._choices[index] = _ChoiceParts(index)
                choice.add(part)
        except (ValueError, RecursionError, TypeError, AttributeError, KeyError) as exc:
            raise UpstreamError(DispatchFailure.LOST, f"the engine's events cannot be read: {exc}") from exc
        if not self._head:
            self._head = {name: value for name, value in chunk.items() if value is not None}
            self._head["object"] = _KINDS.get(chunk.get("object", ""), chunk.get("object"))
