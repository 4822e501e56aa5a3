"""Chat and text completions in OpenAI's format, whole or as a stream of events.

The constant part of a plain answer is encoded once, so that a token costs one concatenation of bytes. An
answer that the request prescribes (tool calls, logprobs, stop strings, JSON) costs more per token. The events
and their order are those of vLLM: a chunk with the role, a chunk per token with the finish reason in the last
one, the usage when it was asked for, `[DONE]`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.engines.emulated.http import encode
from serve_app.engines.emulated.text import (
    CallForm,
    OutputSpec,
    Script,
    ToolCall,
    chat_logprobs,
    pieces,
    ranked,
)
from serve_app.engines.model import EngineSequence

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The content of an answer, as its parts need it.

    Attributes:
        request_id: id of the answer.
        created: Unix time in whole seconds.
        sequences: one per choice, in the order of the prompts.
        finish_reasons: one per choice.
        prompts: number of prompts that the choices answer.
        include_usage: whether a stream ends with the token counts.
        spec: what the request asked of the text; None for placeholder text.
        scripts: the prescribed text of each choice; empty for placeholder text.
    """

    request_id: str
    created: int
    model: str
    sequences: Sequence[EngineSequence]
    finish_reasons: Sequence[str]
    prompts: int = 1
    include_usage: bool = False
    spec: OutputSpec | None = None
    scripts: Sequence[Script] = ()

    def text(self, choice: int, start: int, count: int) -> bytes:
        """Placeholder text of some tokens of a choice."""
        return pieces(self.sequences[choice].number, start, count)

    def whole_text(self, choice: int) -> str:
        """Text of a finished choice."""
        if self.scripts:
            return self.scripts[choice].text
        return self.text(choice, 0, self.sequences[choice].output_tokens).decode()

    @property
    def call(self) -> ToolCall | None:
        """The tool call that the answer is."""
        return None if self.spec is None else self.spec.call

    def call_id(self, choice: int) -> str:
        """Hexadecimal digits that tell a call from all others."""
        name = f"{self.request_id}/{choice}"
        return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()

    def logprobs(self, choice: int, start: int = 0, count: int | None = None) -> list[dict[str, Any]] | None:
        """Entries of some tokens, as chats and responses have them; None when they were not asked for."""
        if self.spec is None or self.spec.top_logprobs is None:
            return None
        tokens = self.scripts[choice].tokens[start : None if count is None else start + count]
        return chat_logprobs(self.spec.seed + choice, start, tokens, self.spec.top_logprobs)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; the choices of one prompt share them."""
        return sum(sequence.prompt_tokens for sequence in self._one_per_prompt())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return sum(sequence.cached_tokens for sequence in self._one_per_prompt())

    @property
    def output_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(sequence.output_tokens for sequence in self.sequences)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "completion_tokens": self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _one_per_prompt(self) -> Sequence[EngineSequence]:
        return self.sequences[:: len(self.sequences) // self.prompts]


class EmulatedAnswer(ABC):
    """One answer, as a whole or as a stream."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def announcement(self) -> bytes:
        """Events that a stream has before anything was computed."""
        return b""

    def opening(self) -> bytes:
        """Events before the first token, sent together with it."""
        return b""

    @abstractmethod
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """Tokens `start` to `start + count - 1` of a choice; `ends` marks its last ones."""

    @abstractmethod
    def ending(self) -> bytes:
        """The end of a stream, after the last token of every choice."""

    @abstractmethod
    def whole(self) -> bytes:
        """The answer as one JSON object."""


class _ChoicesAnswer(EmulatedAnswer):
    """The common part of the two completion APIs: choices, as one object or in chunks.

    A subclass states the objects' names in OpenAI's API, the format of a plain chunk, and the content of a
    choice.
    """

    _kind: ClassVar[str]
    _chunk_kind: ClassVar[str]
    # The chunk's head, the choice's number, its text, and its finish reason.
    _chunk_format: ClassVar[bytes]

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        opening = encode(self._common(self._chunk_kind)).removesuffix(b"}")
        self._chunk_head = b"data: " + opening + b',"choices":[{"index":'

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """One chunk; none for tokens that the client does not see."""
        head = self._head
        if head.spec is None:
            reason = b'"%s"' % head.finish_reasons[choice].encode() if ends else b"null"
            return self._chunk_format % (self._chunk_head, choice, head.text(choice, start, count), reason)
        content = self._delta(choice, start, count, ends=ends)
        return b"" if content is None else self._chunk(choice, content, tokens=start + count)

    def ending(self) -> bytes:
        """The usage, when it was asked for, and the end mark."""
        if not self._head.include_usage:
            return DONE
        usage = encode({**self._common(self._chunk_kind), "choices": [], "usage": self._head.usage()})
        return b"data: " + usage + b"\n\n" + DONE

    def whole(self) -> bytes:
        """The object that holds all choices."""
        head = self._head
        choices = []
        for choice, reason in enumerate(head.finish_reasons):
            end = {"finish_reason": reason, "stop_reason": None}
            if head.scripts:
                end["stop_reason"] = head.scripts[choice].stop_reason
            choices.append({"index": choice, **end, **self._content(choice)})
        return encode({**self._common(self._kind), "choices": choices, "usage": head.usage()})

    def _chunk(self, choice: int, content: dict[str, Any], *, tokens: int) -> bytes:
        """An event with one choice, which has so many tokens by now."""
        head = self._head
        event: dict[str, Any] = {**self._common(self._chunk_kind), "choices": [{"index": choice, **content}]}
        if head.spec is not None and head.spec.continuous_usage:
            prompt = head.sequences[choice].prompt_tokens
            event["usage"] = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + tokens,
                "completion_tokens": tokens,
            }
        return b"data: " + encode(event) + b"\n\n"

    def _common(self, kind: str) -> dict[str, Any]:
        """The beginning of every object and chunk of an answer."""
        head = self._head
        return {"id": head.request_id, "object": kind, "created": head.created, "model": head.model}

    @abstractmethod
    def _content(self, choice: int) -> dict[str, Any]:
        """The text and logprobs of a finished choice."""

    @abstractmethod
    def _delta(self, choice: int, start: int, count: int, *, ends: bool) -> dict[str, Any] | None:
        """The content of a chunk of a prescribed answer."""


class ChatAnswer(_ChoicesAnswer):
    """An answer of `/v1/chat/completions`."""

    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"
    _chunk_format = b'%s%d,"delta":{"content":"%s"},"logprobs":null,"finish_reason":%s}]}\n\n'

    def opening(self) -> bytes:
        """The role, once per choice."""
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(self._chunk(choice, role, tokens=0) for choice in range(len(self._head.sequences)))

    def _delta(self, choice: int, start: int, count: int, *, ends: bool) -> dict[str, Any] | None:
        script = self._head.scripts[choice]
        delta: dict[str, Any] = {}
        if self._head.call is None:
            delta = {"content": script.added(start, count)}
        elif added := script.added_arguments(start, count):
            text, is_first = added
            call = self._call(choice, text) if is_first else {"function": {"arguments": text}}
            delta = {"tool_calls": [{"index": 0, **call}]}
        logprobs = self._logprobs(choice, start, count)
        if not delta and logprobs is None and not ends:
            return None
        content: dict[str, Any] = {"delta": delta, "logprobs": logprobs, "finish_reason": None}
        if ends:
            content["finish_reason"] = self._finish_reason(choice, streaming=True)
            content["stop_reason"] = script.stop_reason
        return content

    def _content(self, choice: int) -> dict[str, Any]:
        content = {"message": self._message(choice), "logprobs": self._logprobs(choice)}
        return {**content, "finish_reason": self._finish_reason(choice, streaming=False)}

    def _message(self, choice: int) -> dict[str, Any]:
        text, call = self._head.whole_text(choice), self._head.call
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if call is None:
            return message
        # vLLM reads calls out of the finished text: a list that is cut is none, and marks that are cut are
        # text. The arguments of a named tool are handed on as they are.
        script = self._head.scripts[choice]
        if call.form is not CallForm.AUTO:
            message["content"] = ""
        if call.form is CallForm.NAMED and text.strip():
            message["tool_calls"] = [self._call(choice, text)]
        elif call.form is not CallForm.NAMED and script.is_whole and script.arguments is not None:
            begin, end = script.arguments
            message["tool_calls"] = [self._call(choice, text[begin:end])]
            message["content"] = None if call.form is CallForm.AUTO else ""
        return message

    def _call(self, choice: int, arguments: str) -> dict[str, Any]:
        call = self._head.call
        assert call is not None, "only the answer that is a call has one"
        return {
            "id": f"chatcmpl-tool-{self._head.call_id(choice)}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _finish_reason(self, choice: int, *, streaming: bool) -> str:
        """As in vLLM: "tool_calls" after a call that was chosen or required, not after a named one."""
        reason, call = self._head.finish_reasons[choice], self._head.call
        if call is None or call.form is CallForm.NAMED or reason != "stop":
            return reason
        if call.form is CallForm.REQUIRED and not streaming:
            return "tool_calls"
        script = self._head.scripts[choice]
        called = script.arguments is not None and len(script.text) > script.arguments[0]
        return "tool_calls" if called and (streaming or script.is_whole) else "stop"

    def _logprobs(self, choice: int, start: int = 0, count: int | None = None) -> dict[str, Any] | None:
        entries = self._head.logprobs(choice, start, count)
        return None if entries is None else {"content": entries}


class CompletionAnswer(_ChoicesAnswer):
    """An answer of `/v1/completions`."""

    _kind = _chunk_kind = "text_completion"
    _chunk_format = b'%s%d,"text":"%s","logprobs":null,"finish_reason":%s,"stop_reason":null}]}\n\n'

    def _delta(self, choice: int, start: int, count: int, *, ends: bool) -> dict[str, Any] | None:
        script = self._head.scripts[choice]
        return {
            "text": script.added(start, count),
            "logprobs": self._logprobs(choice, start, count),
            "finish_reason": script.finish_reason if ends else None,
            "stop_reason": script.stop_reason if ends else None,
        }

    def _content(self, choice: int) -> dict[str, Any]:
        return {"text": self._head.whole_text(choice), "logprobs": self._logprobs(choice)}

    def _logprobs(self, choice: int, start: int = 0, count: int | None = None) -> dict[str, Any] | None:
        """The object of text completions."""
        spec = self._head.spec
        if spec is None or spec.top_logprobs is None:
            return None
        script, top = self._head.scripts[choice], max(1, spec.top_logprobs)
        end = len(script.tokens) if count is None else start + count
        tokens = script.tokens[start:end]
        named = [ranked(spec.seed + choice, start + at, token, top) for at, token in enumerate(tokens)]
        return {
            "text_offset": [0, *script.ends][start : start + len(tokens)],
            "token_logprobs": [entry[0][1] for entry in named],
            "tokens": tokens,
            "top_logprobs": [dict(entry) for entry in named],
        }
