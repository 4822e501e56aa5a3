"""Where do the blocks end by which prompts are compared? At the same places in every prompt, and few of them.

A prompt is cut at fixed places from its start, so that two prompts with the same beginning have the same
leading blocks however they go on. The first 32 blocks have 128 tokens each; from there on each sixteen are
twice as long as those before. So 128 blocks reach through 262,144 tokens, which bounds the work for any
prompt, and what is left of a match beyond its last whole block is at most an eighth of it after 4,096 tokens.

Token ids are cut at exactly these places. Text is cut at four bytes to the token, which is about right for
English; how many tokens a block of text really has is the estimator's knowledge (`cached_tokens`).
"""

from itertools import accumulate

from serve_app.request import PromptShape

BYTES_PER_TOKEN = 4
"""Bytes of text that stand for one token in the places below."""

_FIRST_BLOCKS = (128,) * 32
_LATER_BLOCKS = tuple(128 << octave for octave in range(1, 7) for _ in range(16))
BLOCK_TOKENS = _FIRST_BLOCKS + _LATER_BLOCKS
"""Tokens of each block, the first block first."""
BLOCK_ENDS = tuple(accumulate(BLOCK_TOKENS))
"""Tokens from the start of a prompt to the end of each block."""


def cached_tokens(shape: PromptShape, blocks: int, bytes_per_token: float) -> int:
    """How many tokens of a prompt lie in its first `blocks` blocks?

    Args:
        bytes_per_token: of this kind of text; not needed for token ids.
    """
    if blocks <= 0:
        return 0
    nominal = BLOCK_ENDS[min(blocks, len(BLOCK_ENDS)) - 1]
    if shape.prompt_tokens is not None:
        return min(nominal, shape.prompt_tokens)
    return int(nominal * BYTES_PER_TOKEN / bytes_per_token)
