"""Prompt blocks: the fixed positions at which prompts are cut, so that their beginnings can be compared.

Two prompts with the same beginning have the same leading blocks, however they continue. The first 32 blocks
have 128 tokens each, and every further 16 blocks are twice as long as those before. So 128 blocks cover
262,144 tokens, which bounds the work for any prompt. Beyond 4,096 tokens the part of a match after its last
whole block is at most an eighth of it.

Token ids are cut at exactly these positions. Text is cut at four bytes per token, about right for English;
how many tokens a block of text really has follows from the learned ratio (`cached_tokens`).
"""

from itertools import accumulate

from serve_app.request import PromptShape

BYTES_PER_TOKEN = 4
"""Bytes of text that count as one token in the positions below."""

_FIRST_BLOCKS = (128,) * 32
_LATER_BLOCKS = tuple(128 << octave for octave in range(1, 7) for _ in range(16))
BLOCK_TOKENS = _FIRST_BLOCKS + _LATER_BLOCKS
"""Tokens of each block, the first block first."""
BLOCK_ENDS = tuple(accumulate(BLOCK_TOKENS))
"""Tokens from the start of a prompt to the end of each block."""


def cached_tokens(shape: PromptShape, blocks: int, bytes_per_token: float) -> int:
    """Tokens of a prompt in its first `blocks` blocks.

    Args:
        bytes_per_token: of this kind of text; not needed for token ids.
    """
    if blocks <= 0:
        return 0
    nominal = BLOCK_ENDS[min(blocks, len(BLOCK_ENDS)) - 1]
    if shape.prompt_tokens is not None:
        return min(nominal, shape.prompt_tokens)
    return int(nominal * BYTES_PER_TOKEN / bytes_per_token)
