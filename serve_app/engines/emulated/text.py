"""Text without a model: token counts and block hashes of prompts, and the words of answers.

The pseudo-tokenizer cuts UTF-8 bytes at a fixed ratio. It is deterministic and costs microseconds. Its ratio
differs from the one that the scheduler's estimator starts from, so that the estimator has something to learn.
"""

import itertools
import math
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

# The tokens of answers: plain ASCII words, so that they need no escaping inside JSON.
_ANSWER = (
    b"the request waits its turn while a batch of tokens moves through every layer and each step reads the "
    b"weights once more then one word leaves for every sequence that decodes until the answer is long enough "
    b"to stop"
)
PIECES = tuple(b" " + word for word in _ANSWER.split())
WORDS = tuple(dict.fromkeys(_ANSWER.decode().split()))

VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine model needs it.

    Attributes:
        tokens: its length.
        block_hashes: one hash per full KV block; each covers the prompt up to the end of its block.
        fingerprint: equal for equal prompts, in any process; set where the content decides the answer.
    """

    tokens: int
    block_hashes: Sequence[int] = ()
    fingerprint: str = ""


class PseudoTokenizer:
    """Counts and hashes prompts.

    Args:
        bytes_per_token: mean UTF-8 bytes of a token.
        block_size: tokens in a KV block.
    """

    def __init__(self, bytes_per_token: float, block_size: int) -> None:
        if not bytes_per_token >= 1.0:
            raise ValueError(f"bytes_per_token must be at least 1, got {bytes_per_token}")
        self._bytes_per_token = bytes_per_token
        self._block_size = block_size

    def count(self, text: bytes) -> int:
        """Tokens of a text."""
        return math.ceil(len(text) / self._bytes_per_token)

    def prompt_of_text(self, text: bytes, extra_tokens: int = 0) -> Prompt:
        """A prompt of UTF-8 text; `extra_tokens` (media) are added after the text and not hashed."""
        tokens = self.count(text)
        full_blocks = tokens // self._block_size
        # Block boundaries fall on fractions of a byte; equal prefixes are rounded alike.
        ends = [int(index * self._block_size * self._bytes_per_token) for index in range(full_blocks + 1)]
        parts = (text[start:end] for start, end in itertools.pairwise(ends))
        return Prompt(max(1, tokens + extra_tokens), _chained_hashes(parts))

    def prompt_of_ids(self, token_ids: Sequence[int]) -> Prompt:
        """A prompt that was sent as token ids: its length is exact."""
        size = self._block_size
        full_blocks = len(token_ids) // size
        parts = (tuple(token_ids[index * size : (index + 1) * size]) for index in range(full_blocks))
        return Prompt(max(1, len(token_ids)), _chained_hashes(parts))

    def token_ids(self, text: bytes) -> list[int]:
        """Ids in place of the tokens of a text."""
        ends = [int(index * self._bytes_per_token) for index in range(self.count(text))] + [len(text)]
        return [zlib.crc32(text[start:end]) % VOCABULARY for start, end in itertools.pairwise(ends)]


def text_of(ids: Iterable[int]) -> str:
    """A text in place of the one that these tokens were; ids do not tell it here."""
    return "".join(PIECES[token % len(PIECES)].decode() for token in ids).lstrip()


def _chained_hashes(parts: Iterable[Hashable]) -> list[int]:
    hashes: list[int] = []
    previous = 0
    for part in parts:
        previous = hash((previous, part))
        hashes.append(previous)
    return hashes


def pieces(offset: int, start: int, count: int) -> bytes:
    """Text of the tokens `start` to `start + count - 1` of the answer that begins at word `offset`."""
    first = offset + start
    if count == 1:
        text = PIECES[first % len(PIECES)]
    else:
        text = b"".join(PIECES[index % len(PIECES)] for index in range(first, first + count))
    return text if start else text.lstrip()
