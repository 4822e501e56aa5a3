"""Text without a model: token counts and block hashes of prompts, and the placeholder text of answers.

The pseudo-tokenizer cuts UTF-8 bytes at a fixed ratio. It is deterministic and takes microseconds. Its ratio
differs from the initial ratio of the scheduler's estimator, so that the estimator has something to learn.

An answer is determined completely before it runs (`GeneratedOutput`).
"""

import itertools
import math
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

# Tokens of placeholder answers.
_ANSWER = (
    "the request waits its turn while a batch of tokens moves through every layer and each step reads the "
    "weights once more then one word leaves for every sequence that decodes until the answer is long enough "
    "to stop"
)
_PIECES = tuple(f" {word}" for word in _ANSWER.split())
# With a vocabulary of 128,000 tokens, English has 4 or more, code 3, Chinese 2 to 3; this is in between.
_BYTES_PER_TOKEN = 3.7
_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the form that the engine model needs.

    Attributes:
        block_hashes: one hash per full KV block; each covers the prompt up to the end of its block.
        seed: first word of the answer; equal for equal prompts, in any process.
        source: the text or token ids.
    """

    tokens: int
    block_hashes: Sequence[int]
    seed: int
    source: bytes | Sequence[int]

    @property
    def ids(self) -> Sequence[int]:
        """Token ids; those of a text are placeholders."""
        return token_ids(self.source) if isinstance(self.source, bytes) else self.source


class PseudoTokenizer:
    """Tokenizer that counts prompts and hashes their KV blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def prompt_of_text(self, text: bytes, extra_tokens: int = 0) -> Prompt:
        """Return a prompt of UTF-8 text; `extra_tokens` (media) follow the text and are not hashed."""
        tokens = _count(text)
        full_blocks = tokens // self._block_size
        # Block boundaries fall on fractions of a byte. Equal prefixes are rounded equally.
        ends = [int(index * self._block_size * _BYTES_PER_TOKEN) for index in range(full_blocks + 1)]
        parts = (text[start:end] for start, end in itertools.pairwise(ends))
        return Prompt(max(1, tokens + extra_tokens), _chained_hashes(parts), zlib.crc32(text), text)

    def prompt_of_ids(self, ids: Sequence[int]) -> Prompt:
        """Return a prompt of token ids, whose length is exact. The answer continues its text."""
        size = self._block_size
        parts = (tuple(ids[index * size : (index + 1) * size]) for index in range(len(ids) // size))
        return Prompt(len(ids), _chained_hashes(parts), ids[-1] + 1, ids)


def token_ids(text: bytes) -> list[int]:
    """Return placeholder ids for the tokens of a text."""
    ends = [int(index * _BYTES_PER_TOKEN) for index in range(_count(text))] + [len(text)]
    return [zlib.crc32(text[start:end]) % _VOCABULARY for start, end in itertools.pairwise(ends)]


def _count(text: bytes) -> int:
    return math.ceil(len(text) / _BYTES_PER_TOKEN)


def _chained_hashes(parts: Iterable[Hashable]) -> list[int]:
    hashes: list[int] = []
    previous = 0
    for part in parts:
        previous = hash((previous, part))
        hashes.append(previous)
    return hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedOutput:
    """One answer: words, or the arguments of a tool call.

    Attributes:
        seed: first word.
        tokens: all generated tokens, at least one.
        finish_reason: "stop" or "length".
    """

    seed: int
    tokens: Sequence[str]
    finish_reason: str

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.tokens)

    def added(self, start: int, count: int) -> str:
        """Return the text of some tokens."""
        return "".join(self.tokens[start : start + count])

    def ids(self, start: int, count: int) -> list[int]:
        """Return the ids of some words."""
        return [(self.seed + index) % len(_PIECES) for index in range(start, start + count)]


def words(prompt: Prompt, choice: int, count: int, finish_reason: str) -> GeneratedOutput:
    """Return an answer of so many words. The choices of one prompt differ."""
    seed = prompt.seed + choice
    tokens = [_PIECES[index % len(_PIECES)] for index in range(seed, seed + count)]
    if isinstance(prompt.source, bytes):
        tokens[0] = tokens[0].lstrip()
    return GeneratedOutput(seed=seed, tokens=tokens, finish_reason=finish_reason)


NO_ARGUMENTS = GeneratedOutput(seed=0, tokens=("{}",), finish_reason="stop")
"""Answer that consists of a tool call."""
