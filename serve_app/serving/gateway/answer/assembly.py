"""Assembly of a streamed answer into one JSON object.

An answer that is not streamed is silent until its end, so a dead engine looks like a busy one.
Therefore the gateway can request a stream instead, and assemble the answer.

The result equals the engine's own answer, except for what streams lack: null fields, annotations, and vLLM's
`system_fingerprint`. Texts and logprobs of a choice are joined; of all other fields the last value is used.
"""

from typing import Any

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.serving.gateway.answer.responses import encode
from serve_app.serving.gateway.upstream.response import UpstreamError

_KINDS = {"chat.completion.chunk": "chat.completion"}
_DONE = b"[DONE]"
_decoder = msgspec.json.Decoder(dict[str, Any])


class _ChoiceParts:
    """One choice of a completion while it arrives."""

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
    def finish_reason(self) -> str | None:
        """Reason for the end; None before it."""
        reason: str | None = self._fields["finish_reason"]
        return reason

    def add(self, chunk: dict[str, Any]) -> None:
        """Add the choice's part of one event."""
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

    def lengths(self) -> dict[str, int]:
        """Return the number of parts of each text, for `truncate`."""
        return {name: len(parts) for name, parts in self._texts.items()}

    def truncate(self, lengths: dict[str, int]) -> None:
        """Drop the parts of texts that were added after `lengths` was taken, and the end of the choice."""
        self._texts = {name: self._texts[name][:length] for name, length in lengths.items()}
        self._fields |= {"finish_reason": None, "stop_reason": None}

    def whole(self) -> dict[str, Any]:
        """Return the complete choice."""
        fields = {**self._fields, "logprobs": self._logprobs}
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        if self._message is None:
            return {**fields, "text": texts.get("text", "")}
        content = texts.pop("content", None)
        # After reasoning alone, an engine's message has null content, but its stream begins with "".
        content = (content or None) if texts else content
        message = {"role": "assistant", "content": content, "refusal": None}
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
    """A chat or text completion while its events arrive."""

    def __init__(self) -> None:
        self._rest = b""
        self._head: dict[str, Any] = {}
        self._usage: Any = None
        self._choices: dict[int, _ChoiceParts] = {}
        # The event with the engine's error, if there was one.
        self.error: bytes | None = None

    @property
    def is_complete(self) -> bool:
        """True if all choices that have begun are complete."""
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices.values())

    def feed(self, events: bytes) -> None:
        """Add the next bytes of the stream.

        Raises:
            UpstreamError: they are not events of a completion.
        """
        *lines, self._rest = (self._rest + events).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data and data != _DONE:
                self._add(data)

    def whole(self) -> bytes:
        """Return the answer as one JSON object.

        Raises:
            UpstreamError: the stream ended before all choices did.
        """
        self._check_complete()
        choices = [self._choices[index] for index in sorted(self._choices)]
        return encode({**self._head, "choices": [choice.whole() for choice in choices], "usage": self._usage})

    def _check_complete(self) -> None:
        if not self.is_complete:
            raise UpstreamError(
                DispatchFailure.LOST, "the engine ended its stream before the answer was complete"
            )

    def _add(self, data: bytes) -> None:
        try:
            chunk = _decoder.decode(data)
            if "error" in chunk and chunk["error"] is not None:
                self.error = data
                return
            self._add_chunk(chunk)
        except (ValueError, RecursionError, TypeError, AttributeError, KeyError) as exc:
            raise UpstreamError(DispatchFailure.LOST, f"the engine's events cannot be read: {exc}") from exc

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        """Add one event."""
        self._usage = chunk.pop("usage", None) or self._usage
        for part in chunk.pop("choices", ()):
            index = part["index"]
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = _ChoiceParts(index)
            choice.add(part)
        if not self._head:
            self._head = {name: value for name, value in chunk.items() if value is not None}
            self._head["object"] = _KINDS.get(chunk.get("object", ""), chunk.get("object"))
