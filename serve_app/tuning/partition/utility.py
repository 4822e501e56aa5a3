"""Pruning: neighbouring queues are merged by utility while there are too many.

Source: EWSJF (arXiv 2601.21758), section 4.2, step 3 and Eq 3:

    U(i, i+1) = (rho_i + rho_{i+1}) / (|b_bar_{i+1} - b_bar_i| + eps)

with rho a queue's density (requests per token of width) and b_bar its mean length. It is high for two queues
that are dense and close together. Counts scale all utilities alike, so the order of merging does not depend
on the size of the sample. The sources leave open which pair goes; merging the highest is what the released
code does in effect, and merging the lowest left queues four times as wide.
"""

import itertools

import numpy as np

from serve_app.scheduling.policies.partition import LengthInterval

# Keeps Eq 3 finite; means of neighbours differ by far more, except where lengths are a token apart.
EPSILON_TOKENS = 1e-6


def utility(lower: LengthInterval, upper: LengthInterval) -> float:
    """Eq 3 for two neighbours, in requests per token squared."""
    distance_tokens = abs(upper.mean_tokens - lower.mean_tokens)
    return (lower.density + upper.density) / (distance_tokens + EPSILON_TOKENS)


def prune(intervals: list[LengthInterval], max_queues: int) -> list[LengthInterval]:
    """Merge the neighbours of the highest utility, pair by pair, until at most `max_queues` are left.

    Of equal utilities the pair of the shorter lengths is merged.
    """
    merged = list(intervals)
    utilities = [utility(*pair) for pair in itertools.pairwise(merged)]
    while len(merged) > max_queues:
        pair = int(np.argmax(utilities))
        merged[pair : pair + 2] = [_join(merged[pair], merged[pair + 1])]
        del utilities[pair]
        for index in (pair - 1, pair):
            if 0 <= index < len(utilities):
                utilities[index] = utility(merged[index], merged[index + 1])
    return merged


def _join(lower: LengthInterval, upper: LengthInterval) -> LengthInterval:
    count = lower.count + upper.count
    mean = (lower.mean_tokens * lower.count + upper.mean_tokens * upper.count) / count
    return LengthInterval(
        min_tokens=lower.min_tokens,
        max_tokens=upper.max_tokens,
        mean_tokens=min(max(mean, lower.min_tokens), upper.max_tokens),
        count=count,
    )
