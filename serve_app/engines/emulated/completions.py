"""Chat and text completions in OpenAI's format, complete or as a stream of events.

Events and their order are those of vLLM: for chats a chunk with the role, then chunks with one or more tokens
each (the last one with the finish reason), the usage if requested, `[DONE]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.engines.emulated.driver import Ticket
from serve_app.engines.emulated.http import encode
from serve_app.engines.emulated.requests import Generation
from serve_app.engines.emulated.text import GeneratedOutput
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
    def call(self) -> str | None:
        """Name of the tool that the answer calls, if any."""
        return self.generation.call

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
        """Return one chunk."""
        content = {
            **self._delta(choice, start, count),
            "logprobs": None,
            "finish_reason": self._finish_reason(choice) if ends else None,
            **self._answer.token_ids(choice, start, count),
        }
        return self._chunk(choice, content)

    def final_events(self) -> bytes:
        """Return the usage, if requested, and the end marker."""
        if not self._answer.generation.includes_usage:
            return DONE
        usage = {**self._common(self._chunk_kind), "choices": [], "usage": self._usage()}
        return b"data: " + encode(usage) + b"\n\n" + DONE

    def full_body(self) -> bytes:
        """Return the object with all choices."""
        choices = [
            {
                "index": choice,
                **self._content(choice),
                "logprobs": None,
                "finish_reason": self._finish_reason(choice),
                "stop_reason": None,
            }
            for choice in range(len(self._answer.outputs))
        ]
        return encode({**self._common(self._kind), "choices": choices, "usage": self._usage()})

    def _chunk(self, choice: int, content: dict[str, Any], more: bytes = b"") -> bytes:
        """Return a chunk with one choice and `more` fields."""
        return self._chunk_start + encode({"index": choice, **content}) + b"]" + more + b"}\n\n"

    def _common(self, kind: str) -> dict[str, Any]:
        """Return the fields that begin every object and chunk of an answer."""
        answer = self._answer
        return {"id": answer.request_id, "object": kind, "created": answer.created, "model": answer.model}

    def _usage(self) -> dict[str, Any]:
        answer = self._answer
        return {
            "prompt_tokens": answer.prompt_tokens,
            "total_tokens": answer.prompt_tokens + answer.output_tokens,
            "completion_tokens": answer.output_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        }

    def _finish_reason(self, choice: int) -> str:
        return self._answer.outputs[choice].finish_reason

    @abstractmethod
    def _content(self, choice: int) -> dict[str, Any]:
        """Return the text of a finished choice."""

    @abstractmethod
    def _delta(self, choice: int, start: int, count: int) -> dict[str, Any]:
        """Return the text of some tokens of a choice."""


class ChatAnswer(_ChoicesAnswer):
    """Answer of `/v1/chat/completions`."""

    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"

    def first_token_events(self) -> bytes:
        """Return the role, once per choice."""
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(
            self._chunk(choice, role, _as_fields(self._answer.prompt_ids(choice)))
            for choice in range(len(self._answer.outputs))
        )

    def _delta(self, choice: int, start: int, count: int) -> dict[str, Any]:
        text = self._answer.outputs[choice].added(start, count)
        if self._answer.call is None:
            return {"delta": {"content": text}}
        return {"delta": {"tool_calls": [{"index": 0, **self._call(choice, text)}]}}

    def _content(self, choice: int) -> dict[str, Any]:
        text = self._answer.outputs[choice].text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if self._answer.call is not None:
            message |= {"content": "", "tool_calls": [self._call(choice, text)]}
        return {"message": message}

    def _call(self, choice: int, arguments: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-tool-{self._answer.request_id}-{choice}",
            "type": "function",
            "function": {"name": self._answer.call, "arguments": arguments},
        }

    def _finish_reason(self, choice: int) -> str:
        return super()._finish_reason(choice) if self._answer.call is None else "tool_calls"


class CompletionAnswer(_ChoicesAnswer):
    """Answer of `/v1/completions`."""

    _kind = _chunk_kind = "text_completion"

    def _delta(self, choice: int, start: int, count: int) -> dict[str, Any]:
        text = self._answer.outputs[choice].added(start, count)
        return {"text": text, **({} if start else self._answer.prompt_ids(choice))}

    def _content(self, choice: int) -> dict[str, Any]:
        return {"text": self._answer.outputs[choice].text}


def _as_fields(fields: dict[str, Any]) -> bytes:
    """Return fields for the end of an object that has others."""
    return b"," + encode(fields)[1:-1] if fields else b""
