"""Assembly of a streamed answer into one JSON object, and its continuation on another engine.

`AnswerAssembly`. An answer that is not streamed is silent until its end, so a dead engine looks like a busy
one. Therefore the gateway can request a stream instead, and assemble the answer.

The result equals the engine's own answer, except for what streams lack: null fields, annotations, and vLLM's
`system_fingerprint`. Texts and logprobs of a choice are joined; of all other fields the last value is used.

`ContinuableAssembly` continues an answer whose request was stopped on its replica, or lost with it. vLLM
returns the ids of the prompt and of each generated token (`return_token_ids`). Both together are the next
prompt: as `prompt` of a completion, and in `kv_transfer_params` of a chat, which replaces the chat template.
vLLM documents the latter as experimental; this module is the only one that uses it.

The answer must be that of an uninterrupted request:

- Text lags behind its tokens. Detokenizers hold back parts of characters, and parsers hold back text that may
  begin a tag. Nothing is held back after a chunk with one token whose text ends with a letter or digit,
  because tokens end with their word, and no tag begins inside one. The answer is continued from there.
- An engine that ignores the ids begins the answer anew. The prompt in its first chunk shows this.
- A parser of reasoning must find its state in the prompt. If the first text is not of the kind of the last
  one, the answer is begun anew, too.
- Usage is that of one request: the prompt of the first part, and the output of all parts.
- An answer that ends at the context limit of its engine continues on one with a longer context.
- A client of a stream receives only what need not be generated again. What follows the last word is held back
  until the next one, or the end.

Only requests with `CONTINUABLE_FIELDS` are continued, because others depend on more than the tokens: stop
strings, penalties, grammars and seeds. A default limit of the engine itself counts again after each stop.
"""

from dataclasses import replace
from typing import Any

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.errors import ServeAppError
from serve_app.request import Usage
from serve_app.serving.gateway.answer.responses import encode
from serve_app.serving.gateway.upstream import UpstreamError

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


CONTINUABLE_FIELDS = frozenset(
    [
        *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "n", "stream"),
        *("temperature", "top_p", "top_k", "min_p", "ignore_eos", "skip_special_tokens"),
        *("chat_template_kwargs", "reasoning_effort", "cache_salt", "session_id", "prompt_cache_key"),
        *("user", "safety_identifier", "metadata", "service_tier", "priority", "store", "stream_options"),
    ]
)


class NotContinuedError(ServeAppError):
    """The engine did not continue the answer, which must be begun anew."""


class ContinuableAssembly(AnswerAssembly):
    """An assembly of one choice that outlives the attempts of its request.

    Args:
        limit: maximum number of output tokens; None for no limit.
        longest: longest context of any engine of the model, in tokens; None if it is unknown.

    Attributes:
        kept_tokens: output tokens with which the next attempt continues; 0 to begin anew with a new assembly.
    """

    def __init__(self, limit: int | None, *, is_chat: bool, longest: int | None = None) -> None:
        super().__init__()
        self.kept_tokens = 0
        self._longest = longest or 0
        self._limit = limit
        self._is_chat = is_chat
        # Ids as JSON, without brackets.
        self._prompt = b""
        self._prompt_tokens = 0
        self._output: list[int] = []
        # The kind of the last text that is kept, and the number of parts of all of them.
        self._kept_kind = ""
        self._kept_texts: dict[str, int] = {}
        # Of the current attempt: its prompt, and whether it has been checked, and its first text.
        self._sent = b""
        self._continued_tokens = 0
        self._is_prompt_checked = self._is_kind_checked = False
        self._has_ids = True

    @property
    def is_continued(self) -> bool:
        """True if the current attempt continues the answer."""
        return self._continued_tokens > 0

    def begin_attempt(self) -> list[bytes]:
        """Drop what is not kept, and return the fields of the next attempt."""
        self._rest, self.error = b"", None
        self._is_prompt_checked, self._has_ids = False, True
        kept = self._continued_tokens = self.kept_tokens
        self._is_kind_checked = not kept
        fields = [b'"return_token_ids":true']
        if not kept:
            return fields
        del self._output[kept:]
        self._choices[0].truncate(self._kept_texts)
        self._sent = self._prompt + b"," + _ids(self._output)
        ids = b"[" + self._sent + b"]"
        prompt = b'"kv_transfer_params":{"prompt_token_ids":%b}' if self._is_chat else b'"prompt":%b'
        fields.append(prompt % ids)
        if self._limit is not None:
            name = b"max_completion_tokens" if self._is_chat else b"max_tokens"
            fields.append(b'"%b":%d' % (name, self._limit - kept))
        return fields

    def outgrows(self, context_tokens: int | None) -> bool:
        """Return whether the answer ended at its engine's context limit, and may be longer elsewhere."""
        if not (self.is_complete and self.kept_tokens) or self._choices[0].finish_reason != "length":
            return False
        output = len(self._output)
        used = self._prompt_tokens + output
        return output != self._limit and context_tokens in (used, used + 1) and used + 1 < self._longest

    def counted(self, usage: Usage | None) -> Usage | None:
        """Return the usage of all parts, from that of the last one."""
        if usage is None or not self.is_continued:
            return usage
        prompt, output = self._prompt_tokens, self._continued_tokens + usage.output_tokens
        cached = min(usage.cached_tokens, prompt)
        return replace(usage, prompt_tokens=prompt, output_tokens=output, cached_tokens=cached)

    def _total(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the counts of all parts in the form of the engine."""
        prompt, output = self._prompt_tokens, self._continued_tokens + usage["completion_tokens"]
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        # Details of the output are those of its last part.
        usage = {name: value for name, value in usage.items() if name != "completion_tokens_details"}
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details = {**details, "cached_tokens": min(details["cached_tokens"], prompt)}
            usage["prompt_tokens_details"] = details
        return {**usage, **counts}

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        choice: dict[str, Any] = next(iter(chunk.get("choices") or ()), {})
        # The prompt is in the chunk of a chat, and in the choice of a completion.
        prompts = chunk.pop("prompt_token_ids", None), choice.pop("prompt_token_ids", None)
        ids = choice.pop("token_ids", None) or []
        if not self._is_prompt_checked:
            self._check_prompt(prompts[0] or prompts[1] or [])
        texts = _texts(choice)
        if texts:
            self._check_kind(next(iter(texts)))
            self._has_ids = self._has_ids and bool(ids)
        if self.is_continued and chunk.get("usage"):
            chunk["usage"] = self._total(chunk["usage"])
        self._assemble(chunk)
        self._output += ids
        if len(texts) == len(ids) == 1 and self._has_ids:
            self._keep(*texts.popitem())

    def _assemble(self, chunk: dict[str, Any]) -> None:
        """Add an event without ids to the answer."""
        super()._add_chunk(chunk)

    def _check_prompt(self, prompt: list[int]) -> None:
        self._is_prompt_checked = True
        ids = _ids(prompt)
        if self.is_continued:
            if ids != self._sent:
                raise NotContinuedError("the engine ignored the tokens so far")
        else:
            self._prompt, self._prompt_tokens = ids, len(prompt)
            self._has_ids = bool(prompt)

    def _check_kind(self, kind: str) -> None:
        if not self._is_kind_checked and kind != self._kept_kind:
            raise NotContinuedError(f"the engine continued {self._kept_kind} as {kind}")
        self._is_kind_checked = True

    def _keep(self, kind: str, text: str) -> None:
        """Continue from here, if no text is held back and an output token remains."""
        remain = self._limit is None or len(self._output) < self._limit
        if text[-1].isalnum() and remain and not self.is_complete:
            self.kept_tokens = len(self._output)
            self._kept_kind, self._kept_texts = kind, self._choices[0].lengths()


class ContinuableStream(ContinuableAssembly):
    """The events of a stream that outlives the attempts of its request.

    Args:
        hide_usage: as in `AnswerForm`.
    """

    def __init__(
        self, limit: int | None, *, is_chat: bool, longest: int | None = None, hide_usage: bool
    ) -> None:
        super().__init__(limit, is_chat=is_chat, longest=longest)
        self._hide_usage = hide_usage
        # Events that the client may receive, and those that might be generated again.
        self._ready: list[bytes] = []
        self._held: list[bytes] = []

    def begin_attempt(self) -> list[bytes]:
        """Drop the events that will be generated again, and return the fields of the next attempt."""
        self._held.clear()
        return super().begin_attempt()

    def ready(self) -> bytes:
        """Return the events for the client that have become ready."""
        return b"".join(self._ready)

    def drop_ready(self) -> None:
        """Drop the ready events, which were sent."""
        self._ready.clear()

    def end(self) -> bytes:
        """Return the last events.

        Raises:
            UpstreamError: the stream ended before the answer did.
        """
        self._check_complete()
        return self.ready() + b"".join(self._held) + b"data: [DONE]\n\n"

    def _assemble(self, chunk: dict[str, Any]) -> None:
        choices = chunk.get("choices")
        begins_again = self.is_continued and choices and "role" in (choices[0].get("delta") or ())
        if not (begins_again or (self._hide_usage and not choices)):
            # The client sees one answer, with the id of its first part.
            first = {"id": self._head.get("id"), "created": self._head.get("created")} if self._head else {}
            self._held.append(b"data: " + encode({**chunk, **first}) + b"\n\n")
        super()._assemble(chunk)

    def _keep(self, kind: str, text: str) -> None:
        super()._keep(kind, text)
        if self.kept_tokens == len(self._output):
            self._ready += self._held
            self._held.clear()


def _ids(ids: list[int]) -> bytes:
    return msgspec.json.encode(ids)[1:-1]


def _texts(choice: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a part of a choice, which are not empty, by kind."""
    parts = choice.get("delta") or {"text": choice.get("text")}
    return {kind: text for kind, text in parts.items() if kind != "role" and text and isinstance(text, str)}
