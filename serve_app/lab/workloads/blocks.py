"""Hashes of prompt blocks, computed from the block ids of a trace.

A trace names the leading blocks of a prompt by ids; equal ids mean equal text up to the end of their block.
Gateways and engines hash blocks of other sizes, so their hashes are derived from these ids.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from serve_app.core.routing.prefix import BLOCK_ENDS


def gateway_blocks(ids: Sequence[int], block_tokens: int, prompt_tokens: int) -> Iterator[int]:
    """Yield hashes of a prompt's blocks as a gateway computes them.

    Args:
        ids: ids of the prompt's leading blocks of `block_tokens`.
    """
    known_tokens = min(prompt_tokens, len(ids) * block_tokens)
    for place, end in enumerate(takewhile(lambda end: end <= known_tokens, BLOCK_ENDS)):
        yield ids[(end - 1) // block_tokens] * len(BLOCK_ENDS) + place


def engine_blocks(ids: Sequence[int], block_tokens: int, tokens: int, block_size: int) -> Iterator[int]:
    """Yield hashes of an engine's full blocks among the first `tokens`. One id may cover several of them."""
    per_id = block_tokens // block_size
    if per_id == 1:
        yield from ids[: tokens // block_size]
        return
    for place in range(min(len(ids) * per_id, tokens // block_size)):
        yield ids[place // per_id] * per_id + place % per_id
