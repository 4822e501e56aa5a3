"""Text without a model: token counts and block hashes of prompts, and what answers say.

The pseudo-tokenizer cuts UTF-8 bytes at a fixed ratio. It is deterministic and costs microseconds. Its ratio
differs from the one that the scheduler's estimator starts from, so that the estimator has something to learn.

Most answers are placeholder words, which cost next to nothing per token (`pieces`). Where a request
prescribes more, an `OutputSpec` says what, and the whole answer is decided before it runs (`Script`): its
tokens, where it ends and why, and what a stream has sent when.
"""

import itertools
import math
import random
import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

# The tokens of answers: plain ASCII words, so that they need no escaping inside JSON.
_ANSWER = (
    b"the request waits its turn while a batch of tokens moves through every layer and each step reads the "
    b"weights once more then one word leaves for every sequence that decodes until the answer is long enough "
    b"to stop"
)
_PIECES = tuple(b" " + word for word in _ANSWER.split())
_WORDS = tuple(dict.fromkeys(_ANSWER.decode().split()))

VOCABULARY = 32_000

# Words with their space, short numbers, runs of punctuation, anything else: about what a tokenizer does.
_TOKEN = re.compile(r" ?[^\W\d_]{1,8}|\d{1,3}|[^\w\s]{1,3}|\s+|.", re.DOTALL)

# The generated token has at least this probability, and each next alternative this share of what is left.
_LEAST_PROBABILITY = 0.4
_SHARE = 0.5


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


def _chained_hashes(parts: Iterable[Hashable]) -> list[int]:
    hashes: list[int] = []
    previous = 0
    for part in parts:
        previous = hash((previous, part))
        hashes.append(previous)
    return hashes


def text_of(ids: Iterable[int]) -> str:
    """A text in place of the one that these tokens were; ids do not tell it here."""
    return "".join(_PIECES[token % len(_PIECES)].decode() for token in ids).lstrip()


def pieces(offset: int, start: int, count: int) -> bytes:
    """Text of the tokens `start` to `start + count - 1` of the answer that begins at word `offset`."""
    first = offset + start
    if count == 1:
        text = _PIECES[first % len(_PIECES)]
    else:
        text = b"".join(_PIECES[index % len(_PIECES)] for index in range(first, first + count))
    return text if start else text.lstrip()


# -- prescribed answers -----------------------------------------------------------------------------------

# A rule for the text of an answer: makes the text, and raises `ApiError` when there is none.
Constraint = Callable[[], str]


class CallForm(Enum):
    """How the request came to a tool call, which decides its text and its finish reason, as in vLLM."""

    NAMED = "named"
    REQUIRED = "required"
    AUTO = "auto"


# What a model writes around the arguments. vLLM asks for a list of calls where one is required, and for the
# arguments alone where the tool is named; the marks of "auto" are those of the Hermes format.
_AROUND_ARGUMENTS = {
    CallForm.NAMED: ("", ""),
    CallForm.REQUIRED: ('[{"name": "%s", "parameters": ', "}]"),
    CallForm.AUTO: ('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>"),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The call that an answer consists of."""

    name: str
    arguments: Constraint
    form: CallForm


@dataclass(frozen=True, slots=True)
class RawText:
    """The text of a whole answer, before any limit.

    Attributes:
        arguments: where the arguments of its tool call begin and end.
    """

    text: str
    arguments: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """What a request asks of the text of its answers, beyond some text of some length.

    Attributes:
        seed: the request's, or one derived from its body: equal requests have equal answers.
        constraint: what the text follows; None for placeholder text.
        call: the tool call that the answer is; it replaces the constraint.
        stop: strings that end the answer.
        include_stop: whether the answer then contains the string.
        min_tokens: tokens before which no stop string counts.
        top_logprobs: alternatives per token; None when no logprobs are wanted.
        continuous_usage: whether each chunk of a stream carries the token counts.
    """

    seed: int
    constraint: Constraint | None = None
    call: ToolCall | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    top_logprobs: int | None = None
    continuous_usage: bool = False

    def raw_text(self) -> RawText | None:
        """The text that follows the constraint, or None for placeholder text; may take milliseconds."""
        if self.call is not None:
            before, after = _AROUND_ARGUMENTS[self.call.form]
            before = before.replace("%s", self.call.name)
            arguments = self.call.arguments()
            span = len(before), len(before) + len(arguments)
            return RawText(f"{before}{arguments}{after}", span)
        return None if self.constraint is None else RawText(self.constraint())


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One prescribed answer.

    Attributes:
        tokens: all that are generated, at least one.
        ends: characters up to the end of each token.
        text: what the client gets: the tokens, less what a stop string cuts off.
        is_whole: whether neither a limit nor a stop string cut it.
        finish_reason: "stop" or "length".
        stop_reason: the stop string that ended it.
        held_back: last characters that a stream keeps until it ends, because a stop string may begin there.
        arguments: where the arguments of a tool call begin and end in the uncut text.
    """

    tokens: tuple[str, ...]
    ends: tuple[int, ...]
    text: str
    is_whole: bool
    finish_reason: str
    stop_reason: str | None = None
    held_back: int = 0
    arguments: tuple[int, int] | None = None

    def added(self, start: int, count: int) -> str:
        """Text that a stream sends with some tokens."""
        return self.text[self._sent(start) : self._sent(start + count)]

    def added_arguments(self, start: int, count: int) -> tuple[str, bool] | None:
        """What some tokens add to the arguments of a tool call, and whether they are the first that do."""
        if self.arguments is None:
            return None
        begin, end = self.arguments
        before, after = self._sent(start), self._sent(start + count)
        if after <= begin or before >= end:
            return None
        return self.text[max(before, begin) : min(after, end)], before <= begin

    def _sent(self, tokens: int) -> int:
        """Characters that a stream has sent after so many tokens."""
        if tokens >= len(self.tokens):
            return len(self.text)
        return max(0, self.ends[tokens - 1] - self.held_back) if tokens else 0


def write_script(
    spec: OutputSpec, raw: RawText | None, choice: int, length: tuple[int, str], limit: int
) -> Script:
    """The tokens of one answer.

    Args:
        spec: what the request asks for.
        raw: the text of a constrained answer, None for placeholder text.
        choice: number of the answer in its request.
        length: tokens and finish reason of placeholder text.
        limit: most tokens.
    """
    if raw is None:
        count, reason = length
        first = spec.seed + choice
        tokens = [_PIECES[index % len(_PIECES)].decode() for index in range(first, first + count)]
        tokens[0] = tokens[0].lstrip()
    else:
        # An empty text is one empty token, the end mark.
        tokens = _TOKEN.findall(raw.text) or [""]
        reason = "length" if len(tokens) > limit else "stop"
        tokens = tokens[:limit]
    whole = "".join(tokens)
    ends = list(itertools.accumulate(map(len, tokens)))
    found = _first_stop(whole, ends, spec)
    text, stop_reason = whole, None
    if found is not None:
        stop_reason, last, end = found
        tokens, ends, text, reason = tokens[: last + 1], ends[: last + 1], whole[:end], "stop"
    return Script(
        tokens=tuple(tokens),
        ends=tuple(ends),
        text=text,
        is_whole=found is None and (raw is None or len(whole) == len(raw.text)),
        finish_reason=reason,
        stop_reason=stop_reason,
        held_back=0 if spec.include_stop or not spec.stop else max(map(len, spec.stop)) - 1,
        arguments=None if raw is None else raw.arguments,
    )


def _first_stop(text: str, ends: list[int], spec: OutputSpec) -> tuple[str, int, int] | None:
    """The stop string that is complete first, the token that completes it, and the length of what remains."""
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
    """A token and its alternatives with made-up log probabilities, in falling order.

    They are equal for equal requests. The generated token is the most probable one, as under greedy decoding.

    Args:
        seed: of the answer.
        index: of the token in it.
        token: the one that was generated.
        count: how many to name, at least 1.
    """
    rng = random.Random(f"{seed}:{index}")  # noqa: S311 - a placeholder, not a secret
    probability = rng.uniform(_LEAST_PROBABILITY, 1.0)
    named = [(token, round(math.log(probability), 6))]
    left = 1.0 - probability
    others = [f" {word}" for word in rng.sample(_WORDS, min(count, len(_WORDS))) if f" {word}" != token]
    for other in others[: count - 1]:
        # Rounded down, so that probabilities never add up to more than 1.
        named.append((other, math.floor(math.log(max(left * _SHARE, 1e-9)) * 1e6) / 1e6))
        left *= 1.0 - _SHARE
    return named


def chat_logprobs(seed: int, start: int, tokens: Sequence[str], top: int) -> list[dict[str, Any]]:
    """Entries of chat completions and responses for tokens from number `start` on."""
    entries = []
    for index, token in enumerate(tokens, start):
        named = [
            {"token": text, "logprob": value, "bytes": list(text.encode())}
            for text, value in ranked(seed, index, token, max(1, top))
        ]
        entries.append({**named[0], "top_logprobs": named[:top]})
    return entries
