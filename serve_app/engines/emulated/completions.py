"""Chat and text completions in OpenAI's format, complete or as a stream of events.

Events and their order are those of vLLM: for chats a chunk with the role, then chunks with one or more tokens
each (the last one with the finish reason), the usage if requested, `[DONE]`. Tokens that may begin a stop
string are held back.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.engines.emulated.driver import Ticket
from serve_app.engines.emulated.http import encode
from serve_app.engines.emulated.requests import Generation
from serve_app.engines.emulated.text import GeneratedOutput, ToolCall, chat_logprobs, ranked
from serve_app.engines.model import EngineSequence

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerContent:
    """Content of an answer, independent of the API that formats it.

    Attributes:
        created: Unix time in whole seconds.
    """

    request_id: str
    created: int
    model: str
    generation: Generation
    ticket: Ticket

    @property
    def outputs(self) -> Sequence[GeneratedOutput]:
        """Generated outputs, one per choice, in the order of the prompts."""
        return self.ticket.outputs

    @property
    def call(self) -> ToolCall | None:
        """The tool call that the answer consists of, if any."""
        return self.generation.spec.call

    def call_id(self, choice: int) -> str:
        """Return hexadecimal digits that identify a tool call uniquely."""
        name = f"{self.request_id}/{choice}"
        return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()

    def prompt_ids(self, choice: int) -> dict[str, Any]:
        """Return the field with the prompt's ids, if they are requested."""
        if not self.generation.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.generation.prompts[choice // self.generation.choices].ids}

    def token_ids(self, choice: int, start: int, count: int) -> dict[str, Any]:
        """Return the field with the ids of some tokens, if they are requested."""
        if not self.generation.body.return_token_ids:
            return {}
        return {"token_ids": self.outputs[choice].ids(start, count)}

    def logprobs(self, choice: int, start: int = 0, count: int | None = None) -> list[dict[str, Any]] | None:
        """Return the logprobs of some tokens in the format of chats and responses; None if not requested."""
        top, output = self.generation.spec.top_logprobs, self.outputs[choice]
        if top is None:
            return None
        return chat_logprobs(output, start, len(output.tokens) if count is None else start + count, top)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts. The choices of one prompt share its tokens."""
        return sum(sequence.prompt_tokens for sequence in self._one_per_prompt())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(sequence.cached_tokens for sequence in self._one_per_prompt())

    @property
    def output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(sequence.output_tokens for sequence in self.ticket.sequences)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "completion_tokens": self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _one_per_prompt(self) -> Sequence[EngineSequence]:
        return self.ticket.sequences[:: self.generation.choices]


class EmulatedAnswer(ABC):
    """Formatter of one answer, complete or as a stream."""

    def __init__(self, answer: AnswerContent) -> None:
        self._answer = answer

    def initial_events(self) -> bytes:
        """Return the events that a stream sends before the engine computes anything."""
        return b""

    def first_token_events(self) -> bytes:
        """Return the events that are sent together with the first token, before it."""
        return b""

    @abstractmethod
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """Return the events for `count` tokens of a choice from `start` on; `ends` marks its last tokens."""

    @abstractmethod
    def final_events(self) -> bytes:
        """Return the end of a stream, sent after the last token of every choice."""

    @abstractmethod
    def full_body(self) -> bytes:
        """Return the answer as one JSON object."""


class _ChoicesAnswer(EmulatedAnswer):
    """Common part of the two completion APIs: choices in one object or in chunks.

    Subclasses define the object names of OpenAI's API and the content of a choice.
    """

    _kind: ClassVar[str]
    _chunk_kind: ClassVar[str]

    def __init__(self, answer: AnswerContent) -> None:
        super().__init__(answer)
        # Serialized once, because it is the same in all chunks of a stream.
        common = encode(self._common(self._chunk_kind)).removesuffix(b"}")
        self._chunk_start = b"data: " + common + b',"choices":['

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """Return one chunk, or no bytes for tokens that the client does not see."""
        content = self._delta(choice, start, count, ends=ends)
        if content is None:
            return b""
        if ends:
            content["finish_reason"] = self._finish_reason(choice)
            content["stop_reason"] = self._answer.outputs[choice].stop_reason
        content |= self._answer.token_ids(choice, start, count)
        return self._chunk(choice, content, tokens=start + count)

    def final_events(self) -> bytes:
        """Return the usage, if requested, and the end marker."""
        if not self._answer.generation.includes_usage:
            return DONE
        usage = {**self._common(self._chunk_kind), "choices": [], "usage": self._answer.usage()}
        return b"data: " + encode(usage) + b"\n\n" + DONE

    def full_body(self) -> bytes:
        """Return the object with all choices."""
        choices = [
            {
                "index": choice,
                **self._content(choice),
                "finish_reason": self._finish_reason(choice),
                "stop_reason": output.stop_reason,
            }
            for choice, output in enumerate(self._answer.outputs)
        ]
        return encode({**self._common(self._kind), "choices": choices, "usage": self._answer.usage()})

    def _chunk(self, choice: int, content: dict[str, Any], *, tokens: int, more: bytes = b"") -> bytes:
        """Return a chunk with one choice and `more` fields; `tokens` have been generated for the choice."""
        event = self._chunk_start + encode({"index": choice, **content}) + b"]"
        if self._answer.generation.counts_continuously:
            prompt = self._answer.ticket.sequences[choice].prompt_tokens
            usage = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + tokens,
                "completion_tokens": tokens,
            }
            event += b',"usage":' + encode(usage)
        return event + more + b"}\n\n"

    def _common(self, kind: str) -> dict[str, Any]:
        """Return the fields that begin every object and chunk of an answer."""
        answer = self._answer
        return {"id": answer.request_id, "object": kind, "created": answer.created, "model": answer.model}

    def _finish_reason(self, choice: int) -> str:
        return self._answer.outputs[choice].finish_reason

    @abstractmethod
    def _content(self, choice: int) -> dict[str, Any]:
        """Return the text and logprobs of a finished choice."""

    @abstractmethod
    def _delta(self, choice: int, start: int, count: int, *, ends: bool) -> dict[str, Any] | None:
        """Return the content of a chunk without finish reason, or None to send no chunk."""


class ChatAnswer(_ChoicesAnswer):
    """Answer of `/v1/chat/completions`."""

    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"

    def first_token_events(self) -> bytes:
        """Return the role, once per choice."""
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(
            self._chunk(choice, role, tokens=0, more=_as_fields(self._answer.prompt_ids(choice)))
            for choice in range(len(self._answer.outputs))
        )

    def _delta(self, choice: int, start: int, count: int, *, ends: bool) -> dict[str, Any] | None:
        text = self._answer.outputs[choice].added(start, count)
        logprobs = self._logprobs(choice, start, count)
        delta: dict[str, Any] = {"content": text}
        if self._answer.call is not None:
            call = {"function": {"arguments": text}} if start else self._call(choice, text)
            delta = {"tool_calls": [{"index": 0, **call}]}
        # The first chunk of a call has its name, even if all text so far is held back, because it may begin a
        # stop string.
        begins = self._answer.call is not None and not start
        if not (text or logprobs or begins or ends or self._answer.generation.body.return_token_ids):
            return None
        return {"delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _content(self, choice: int) -> dict[str, Any]:
        output, call = self._answer.outputs[choice], self._answer.call
        message: dict[str, Any] = {"role": "assistant", "content": output.text}
        if call is not None:
            message["content"] = ""
            # vLLM passes on the arguments of a named tool unparsed. It parses other calls from the finished
            # text, where a truncated call is not recognised.
            if call.is_named or output.is_complete:
                message["tool_calls"] = [self._call(choice, output.text)]
        return {"message": message, "logprobs": self._logprobs(choice)}

    def _call(self, choice: int, arguments: str) -> dict[str, Any]:
        call = self._answer.call
        assert call is not None, "called only for tool calls"
        return {
            "id": f"chatcmpl-tool-{self._answer.call_id(choice)}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _finish_reason(self, choice: int) -> str:
        """Return "tool_calls" after a call that is not named, as vLLM does; otherwise the output's reason."""
        output, call = self._answer.outputs[choice], self._answer.call
        calls = call is not None and not call.is_named and output.is_complete
        return "tool_calls" if calls else output.finish_reason

    def _logprobs(self, choice: int, start: int = 0, count: int | None = None) -> dict[str, Any] | None:
        entries = self._answer.logprobs(choice, start, count)
        return None if entries is None else {"content": entries}


class CompletionAnswer(_ChoicesAnswer):
    """Answer of `/v1/completions`."""

    _kind = _chunk_kind = "text_completion"

    def _delta(self, choice: int, start: int, count: int, *, ends: bool) -> dict[str, Any]:  # noqa: ARG002
        output = self._answer.outputs[choice]
        return {
            "text": output.added(start, count),
            "logprobs": self._logprobs(choice, start, count),
            "finish_reason": None,
            "stop_reason": None,
            **({} if start else self._answer.prompt_ids(choice)),
        }

    def _content(self, choice: int) -> dict[str, Any]:
        output = self._answer.outputs[choice]
        return {"text": output.text, "logprobs": self._logprobs(choice)}

    def _logprobs(self, choice: int, start: int = 0, count: int | None = None) -> dict[str, Any] | None:
        """Return the logprobs object of text completions."""
        top, output = self._answer.generation.spec.top_logprobs, self._answer.outputs[choice]
        if top is None:
            return None
        tokens = output.tokens[start : None if count is None else start + count]
        named = [ranked(output.seed, at, token, max(1, top)) for at, token in enumerate(tokens, start)]
        return {
            "text_offset": [0, *output.ends][start : start + len(tokens)],
            "token_logprobs": [entry[0][1] for entry in named],
            "tokens": tokens,
            "top_logprobs": [dict(entry) for entry in named],
        }


def _as_fields(fields: dict[str, Any]) -> bytes:
    """Return fields for the end of an object that has others."""
    return b"," + encode(fields)[1:-1] if fields else b""
