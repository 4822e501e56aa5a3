"""Text without a model: token counts and block hashes of prompts, and the text of answers.

The pseudo-tokenizer cuts UTF-8 bytes at a fixed ratio. It is deterministic and takes microseconds. Its ratio
differs from the initial ratio of the scheduler's estimator, so that the estimator has something to learn.

An answer is determined completely before it runs (`GeneratedOutput`): its tokens, its end and finish reason,
and what a stream has sent after each token. `OutputSpec` holds the request's requirements on the text. Most
answers are placeholder words.
"""

import itertools
import math
import random
import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Tokens of placeholder answers.
_ANSWER = (
    "the request waits its turn while a batch of tokens moves through every layer and each step reads the "
    "weights once more then one word leaves for every sequence that decodes until the answer is long enough "
    "to stop"
)
_PIECES = tuple(f" {word}" for word in _ANSWER.split())
_WORDS = tuple(dict.fromkeys(_ANSWER.split()))
# With a vocabulary of 128,000 tokens, English has 4 or more, code 3, Chinese 2 to 3; this is in between.
_BYTES_PER_TOKEN = 3.7

VOCABULARY = 32_000

# Words with their space, short numbers, runs of punctuation, anything else: approximately a tokenizer's cuts.
_TOKEN = re.compile(r" ?[^\W\d_]{1,8}|\d{1,3}|[^\w\s]{1,3}|\s+|.", re.DOTALL)

# Minimum probability of the generated token, and share of the remainder for each further alternative.
_MIN_PROBABILITY = 0.4
_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the form that the engine model needs.

    Attributes:
        block_hashes: one hash per full KV block; each covers the prompt up to the end of its block.
        seed: seed of the placeholder answer; equal for equal prompts, in any process.
        source: the text or token ids.
    """

    tokens: int
    block_hashes: Sequence[int]
    seed: int
    source: bytes | Sequence[int] = b""

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

    def prompt_of_ids(self, token_ids: Sequence[int]) -> Prompt:
        """Return a prompt that was sent as token ids, whose length is exact."""
        size = self._block_size
        full_blocks = len(token_ids) // size
        parts = (tuple(token_ids[index * size : (index + 1) * size]) for index in range(full_blocks))
        seed = zlib.crc32(str(token_ids).encode())
        return Prompt(max(1, len(token_ids)), _chained_hashes(parts), seed, token_ids)

    def continued(self, token_ids: Sequence[int]) -> Prompt:
        """Return a prompt of ids whose placeholder answer follows the word of the last id."""
        return replace(self.prompt_of_ids(token_ids), seed=token_ids[-1] + 1)


def token_ids(text: bytes) -> list[int]:
    """Return placeholder ids for the tokens of a text."""
    ends = [int(index * _BYTES_PER_TOKEN) for index in range(_count(text))] + [len(text)]
    return [zlib.crc32(text[start:end]) % VOCABULARY for start, end in itertools.pairwise(ends)]


def text_of(ids: Iterable[int]) -> str:
    """Return placeholder text for token ids. The original text cannot be recovered."""
    return "".join(_PIECES[token % len(_PIECES)] for token in ids).lstrip()


def _count(text: bytes) -> int:
    return math.ceil(len(text) / _BYTES_PER_TOKEN)


def _chained_hashes(parts: Iterable[Hashable]) -> list[int]:
    hashes: list[int] = []
    previous = 0
    for part in parts:
        previous = hash((previous, part))
        hashes.append(previous)
    return hashes


# -- answers ----------------------------------------------------------------------------------------------

# Returns the text of an answer, or raises `ApiError` if no text satisfies the rule.
Constraint = Callable[[], str]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that makes up the whole answer: its text is the arguments.

    Attributes:
        is_named: whether the request names the tool; vLLM then reports finish reason "stop".
    """

    name: str
    arguments: Constraint
    is_named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """Requirements of a request on the text of its answers.

    Attributes:
        seed: the request's seed; None to use the prompt's, so that equal requests have equal answers.
        constraint: rule for the text; None for placeholder text.
        call: the tool call that makes up the answer; replaces the constraint.
        stop: strings that end the answer.
        include_stop: whether the answer includes the stop string.
        min_tokens: tokens before which stop strings are ignored.
        top_logprobs: alternatives per token; None if logprobs are not requested.
        continues: whether the text continues the prompt, which consists of token ids.
    """

    seed: int | None = None
    continues: bool = False
    constraint: Constraint | None = None
    call: ToolCall | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedOutput:
    """One answer: the text, or the arguments of a tool call.

    Attributes:
        seed: seed of the placeholder log probabilities.
        tokens: all generated tokens, at least one.
        ends: characters up to the end of each token.
        text: the part that the client receives: the tokens without what a stop string cuts off.
        finish_reason: "stop" or "length".
        stop_reason: the stop string that ended the answer.
        buffered_characters: buffered by a stream until the end, because a stop string may begin there.
    """

    seed: int
    tokens: Sequence[str]
    ends: Sequence[int]
    text: str
    finish_reason: str
    stop_reason: str | None = None
    buffered_characters: int = 0

    @property
    def is_complete(self) -> bool:
        """True if neither a limit nor a stop string cut the answer."""
        return self.finish_reason == "stop" and self.stop_reason is None

    def ids(self, start: int, count: int) -> list[int]:
        """Return the ids of some tokens of a placeholder text."""
        return [(self.seed + index) % len(_PIECES) for index in range(start, start + count)]

    def added(self, start: int, count: int) -> str:
        """Return the text that a stream sends for some tokens."""
        return self.text[self._sent(start) : self._sent(start + count)]

    def _sent(self, tokens: int) -> int:
        """Return the characters that a stream has sent after `tokens` tokens."""
        if tokens >= len(self.tokens):
            return len(self.text)
        return max(0, self.ends[tokens - 1] - self.buffered_characters) if tokens else 0


def generate_output(
    spec: OutputSpec, raw: str | None, seed: int, length: tuple[int, str], limit: int
) -> GeneratedOutput:
    """Return one answer.

    Args:
        raw: complete text of a constrained answer or a tool call; None for placeholder text.
        seed: seed of placeholder text and log probabilities.
        length: tokens and finish reason of placeholder text.
        limit: maximum number of tokens.
    """
    if raw is None:
        count, reason = length
        tokens = [_PIECES[index % len(_PIECES)] for index in range(seed, seed + count)]
        if not spec.continues:
            tokens[0] = tokens[0].lstrip()
    else:
        # An empty text is one empty token, the end-of-sequence token.
        tokens = _TOKEN.findall(raw) or [""]
        reason = "length" if len(tokens) > limit else "stop"
        tokens = tokens[:limit]
    text, stop_reason = "".join(tokens), None
    ends = list(itertools.accumulate(map(len, tokens)))
    found = _first_stop(text, ends, spec)
    if found is not None:
        stop_reason, last, end = found
        tokens, ends, text, reason = tokens[: last + 1], ends[: last + 1], text[:end], "stop"
    return GeneratedOutput(
        seed=seed,
        tokens=tokens,
        ends=ends,
        text=text,
        finish_reason=reason,
        stop_reason=stop_reason,
        buffered_characters=0 if spec.include_stop or not spec.stop else max(map(len, spec.stop)) - 1,
    )


def _first_stop(text: str, ends: list[int], spec: OutputSpec) -> tuple[str, int, int] | None:
    """Return the stop string completed first, the index of its last token, and the remaining length."""
    # As in vLLM, a string that ends within the first `min_tokens` tokens does not count.
    ignored = ends[min(spec.min_tokens, len(ends)) - 1] if spec.min_tokens else 0
    best: tuple[str, int, int] | None = None
    for stop in spec.stop:
        start = text.find(stop, max(0, ignored - len(stop) + 1))
        if start < 0:
            continue
        last = next(index for index, end in enumerate(ends) if end >= start + len(stop))
        if best is None or last < best[1]:
            best = stop, last, start + (len(stop) if spec.include_stop else 0)
    return best


# -- logprobs ---------------------------------------------------------------------------------------------


def ranked(seed: int, index: int, token: str, count: int) -> list[tuple[str, float]]:
    """Return a token and its alternatives with placeholder log probabilities, in descending order.

    They are equal for equal requests. The generated token is the most probable one, as with greedy decoding.

    Args:
        seed: seed of the answer.
        index: position of the token in the answer.
        count: number of entries, at least 1.
    """
    rng = random.Random(f"{seed}:{index}")  # noqa: S311 - a placeholder, not a secret
    probability = rng.uniform(_MIN_PROBABILITY, 1.0)
    named = [(token, round(math.log(probability), 6))]
    left = 1.0 - probability
    others = [f" {word}" for word in rng.sample(_WORDS, min(count, len(_WORDS))) if f" {word}" != token]
    for other in others[: count - 1]:
        # Rounded down, so that the probabilities never exceed 1 in total.
        named.append((other, math.floor(math.log(max(left * _SHARE, 1e-9)) * 1e6) / 1e6))
        left *= 1.0 - _SHARE
    return named


def chat_logprobs(output: GeneratedOutput, start: int, end: int, top: int) -> list[dict[str, Any]]:
    """Return the logprobs of tokens `start` to `end - 1` in the format of chats and responses."""
    entries = []
    for index, token in enumerate(output.tokens[start:end], start):
        named = [
            {"token": text, "logprob": value, "bytes": list(text.encode())}
            for text, value in ranked(output.seed, index, token, max(1, top))
        ]
        entries.append({**named[0], "top_logprobs": named[:top]})
    return entries
