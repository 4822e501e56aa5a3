"""Blocks of a prompt: their sizes, and the tokens of a prompt in its first ones."""

from itertools import accumulate

from serve_app.request import PromptShape

BYTES_PER_TOKEN = 4
"""Bytes of text that count as one token in the positions of blocks."""

_FIRST_BLOCKS = (128,) * 32
_LATER_BLOCKS = tuple(128 << octave for octave in range(1, 7) for _ in range(16))
BLOCK_TOKENS = _FIRST_BLOCKS + _LATER_BLOCKS
"""Tokens of each block, the first block first."""
BLOCK_ENDS = tuple(accumulate(BLOCK_TOKENS))
"""Tokens from the start of a prompt to the end of each block."""


def cached_tokens(shape: PromptShape, blocks: int, bytes_per_token: float) -> int:
    """Return the tokens of a prompt in its first `blocks` blocks.

    Args:
        bytes_per_token: ratio of this text; not used for prompts of token ids.
    """
    if blocks <= 0:
        return 0
    nominal = BLOCK_ENDS[min(blocks, len(BLOCK_ENDS)) - 1]
    if shape.prompt_tokens is not None:
        return min(nominal, shape.prompt_tokens)
    return int(nominal * BYTES_PER_TOKEN / bytes_per_token)
