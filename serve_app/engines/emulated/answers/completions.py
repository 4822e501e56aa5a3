"""Answers of placeholder text in OpenAI's formats: chat and text completions, whole or as a stream of events.

The constant part of an answer is encoded once, so that a token costs one concatenation of bytes. The events
and their order are those of vLLM: a chunk with the role, a chunk per token with the finish reason in the last
one, the usage when it was asked for, `[DONE]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from serve_app.engine_model import EngineSequence
from serve_app.engines.emulated.text import pieces

encode = msgspec.json.encode
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
    """

    request_id: str
    created: int
    model: str
    sequences: Sequence[EngineSequence]
    finish_reasons: Sequence[str]
    prompts: int = 1
    include_usage: bool = False

    def text(self, choice: int, start: int, count: int) -> bytes:
        """Text of some tokens of a choice."""
        return pieces(self.sequences[choice].number, start, count)

    def whole_text(self, choice: int) -> str:
        """Text of a finished choice."""
        return self.text(choice, 0, self.sequences[choice].output_tokens).decode()

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


class EmulatedAnswer(Protocol):
    """One answer, as a whole or as a stream."""

    def announcement(self) -> bytes:
        """What a stream has before anything was computed."""

    def opening(self) -> bytes:
        """What goes before the first token, with it."""

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """Tokens `start` to `start + count - 1` of a choice; `ends` marks its last ones."""

    def ending(self) -> bytes:
        """The end of a stream, after the last token of every choice."""

    def whole(self) -> bytes:
        """The answer as one JSON object."""


class _ChoicesAnswer(ABC):
    """What the two completion APIs share: choices, as one object or in chunks.

    A subclass states the objects' names in OpenAI's API, the format of a chunk, and the text of a whole
    choice.
    """

    _kind: ClassVar[str]
    _chunk_kind: ClassVar[str]
    # The chunk's head, the choice's number, its text, and its finish reason.
    _chunk_format: ClassVar[bytes]

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        opening = encode(common(head, self._chunk_kind)).removesuffix(b"}")
        self._chunk_head = b"data: " + opening + b',"choices":[{"index":'

    def announcement(self) -> bytes:
        """Nothing: the stream begins with the first token."""
        return b""

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """One chunk."""
        head = self._head
        reason = b'"%s"' % head.finish_reasons[choice].encode() if ends else b"null"
        return self._chunk_format % (self._chunk_head, choice, head.text(choice, start, count), reason)

    def ending(self) -> bytes:
        """The usage, when it was asked for, and the end mark."""
        head = self._head
        if not head.include_usage:
            return DONE
        usage = encode({**common(head, self._chunk_kind), "choices": [], "usage": head.usage()})
        return b"data: " + usage + b"\n\n" + DONE

    def whole(self) -> bytes:
        """The object that holds all choices."""
        head = self._head
        choices = [
            {
                "index": choice,
                **self._content(head.whole_text(choice)),
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": None,
            }
            for choice, reason in enumerate(head.finish_reasons)
        ]
        return encode({**common(head, self._kind), "choices": choices, "usage": head.usage()})

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """The text of a choice, as its object holds it."""


class ChatAnswer(_ChoicesAnswer):
    """An answer of `/v1/chat/completions`."""

    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"
    _chunk_format = b'%s%d,"delta":{"content":"%s"},"logprobs":null,"finish_reason":%s}]}\n\n'

    def opening(self) -> bytes:
        """The role, once per choice."""
        return b"".join(
            b'%s%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
            % (self._chunk_head, choice)
            for choice in range(len(self._head.sequences))
        )

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


class CompletionAnswer(_ChoicesAnswer):
    """An answer of `/v1/completions`."""

    _kind = _chunk_kind = "text_completion"
    _chunk_format = b'%s%d,"text":"%s","logprobs":null,"finish_reason":%s,"stop_reason":null}]}\n\n'

    def opening(self) -> bytes:
        """Nothing: the stream begins with the first token."""
        return b""

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}


def common(head: AnswerHead, kind: str) -> dict[str, Any]:
    """What every object and chunk of an answer begins with."""
    return {"id": head.request_id, "object": kind, "created": head.created, "model": head.model}
