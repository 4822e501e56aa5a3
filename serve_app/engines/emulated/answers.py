"""Answers in OpenAI's shapes: chat completions and text completions, whole or as a stream of events.

What does not change within an answer is encoded once; a token then costs a concatenation of bytes. Shapes and
order of
the events are those of vLLM: a chunk with the role, a chunk per token, the reason in the last of them, the
usage when it was asked for, `[DONE]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from serve_app.engine_model import EngineSequence
from serve_app.engines.emulated.text import pieces

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every part of an answer is made from.

    Attributes:
        request_id: what the client sees as the answer's id.
        created: Unix time in whole seconds.
        sequences: one per choice, those of the first prompt first.
        finish_reasons: why each of them ends.
        prompts: how many prompts the choices belong to.
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
        """Tokens of the prompts; the choices of one prompt share it."""
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
    """One answer, written whole or piece by piece."""

    def opening(self) -> bytes:
        """What a stream begins with, before its first token."""

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """Tokens `start` to `start + count - 1` of a choice; `ends` says that they are its last."""

    def ending(self) -> bytes:
        """What a stream ends with, after the last token of every choice."""

    def whole(self) -> bytes:
        """The answer as one JSON object."""


class ChatAnswer:
    """An answer of `/v1/chat/completions`."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._chunk = _chunk_head(head, "chat.completion.chunk")

    def opening(self) -> bytes:
        """The role, once per choice."""
        return b"".join(
            b'%s%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
            % (self._chunk, choice)
            for choice in range(len(self._head.sequences))
        )

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """One chunk."""
        text = self._head.text(choice, start, count)
        reason = _reason(self._head, choice) if ends else b"null"
        return b'%s%d,"delta":{"content":"%s"},"logprobs":null,"finish_reason":%s}]}\n\n' % (
            self._chunk,
            choice,
            text,
            reason,
        )

    def ending(self) -> bytes:
        """The usage, when it was asked for, and the end mark."""
        return _usage_chunk(self._head, "chat.completion.chunk") + DONE

    def whole(self) -> bytes:
        """A chat completion object."""
        head = self._head
        choices = [
            {
                "index": choice,
                "message": {"role": "assistant", "content": head.whole_text(choice), "tool_calls": []},
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": None,
            }
            for choice, reason in enumerate(head.finish_reasons)
        ]
        return encode({**_common(head, "chat.completion"), "choices": choices, "usage": head.usage()})


class CompletionAnswer:
    """An answer of `/v1/completions`."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._chunk = _chunk_head(head, "text_completion")

    def opening(self) -> bytes:
        """Nothing: text begins with its first token."""
        return b""

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:
        """One chunk."""
        text = self._head.text(choice, start, count)
        reason = _reason(self._head, choice) if ends else b"null"
        return b'%s%d,"text":"%s","logprobs":null,"finish_reason":%s,"stop_reason":null}]}\n\n' % (
            self._chunk,
            choice,
            text,
            reason,
        )

    def ending(self) -> bytes:
        """The usage, when it was asked for, and the end mark."""
        return _usage_chunk(self._head, "text_completion") + DONE

    def whole(self) -> bytes:
        """A text completion object."""
        head = self._head
        choices = [
            {
                "index": choice,
                "text": head.whole_text(choice),
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": None,
            }
            for choice, reason in enumerate(head.finish_reasons)
        ]
        return encode({**_common(head, "text_completion"), "choices": choices, "usage": head.usage()})


def _common(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {"id": head.request_id, "object": kind, "created": head.created, "model": head.model}


def _chunk_head(head: AnswerHead, kind: str) -> bytes:
    """A chunk up to the number of its choice."""
    return b"data: " + encode(_common(head, kind)).removesuffix(b"}") + b',"choices":[{"index":'


def _usage_chunk(head: AnswerHead, kind: str) -> bytes:
    if not head.include_usage:
        return b""
    return b"data: " + encode({**_common(head, kind), "choices": [], "usage": head.usage()}) + b"\n\n"


def _reason(head: AnswerHead, choice: int) -> bytes:
    return b'"%s"' % head.finish_reasons[choice].encode()
