"""Log probabilities of tokens: made up, equal for equal requests, never above 0, in the formats of each API.

The generated token is the most probable one, as under greedy decoding.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

from serve_app.engines.emulated.text import WORDS

# The generated token has at least this probability.
_LEAST = 0.4
# Each next alternative has this share of what is left.
_SHARE = 0.5


def ranked(seed: int, index: int, token: str, count: int) -> list[tuple[str, float]]:
    """The generated token and its alternatives with their log probabilities, in falling order.

    Args:
        seed: of the answer.
        index: of the token in it.
        token: the one that was generated.
        count: how many to name, at least 1.
    """
    rng = random.Random(f"{seed}:{index}")  # noqa: S311 - a placeholder, not a secret
    probability = rng.uniform(_LEAST, 1.0)
    named = [(token, round(math.log(probability), 6))]
    left = 1.0 - probability
    others = [f" {word}" for word in rng.sample(WORDS, min(count, len(WORDS))) if f" {word}" != token]
    for other in others[: count - 1]:
        # Rounded down, so that probabilities never add up to more than 1.
        named.append((other, math.floor(math.log(max(left * _SHARE, 1e-9)) * 1e6) / 1e6))
        left *= 1.0 - _SHARE
    return named


def chat_entries(seed: int, start: int, tokens: Sequence[str], top: int) -> list[dict[str, Any]]:
    """Entries of chat completions and responses for tokens from number `start` on."""
    return [
        _entry(ranked(seed, start + index, token, max(1, top)), top) for index, token in enumerate(tokens)
    ]


def _entry(named: list[tuple[str, float]], top: int) -> dict[str, Any]:
    alternatives = [_token(token, value) for token, value in named]
    return {**alternatives[0], "top_logprobs": alternatives[:top]}


def _token(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def completion_logprobs(
    seed: int, start: int, tokens: Sequence[str], top: int, text_offset: int
) -> dict[str, Any]:
    """The object of text completions for tokens from number `start` on; the first is at `text_offset`."""
    named = [ranked(seed, start + index, token, max(1, top)) for index, token in enumerate(tokens)]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [entry[0][1] for entry in named],
        "tokens": list(tokens),
        "top_logprobs": [dict(entry) for entry in named],
    }
