from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.prefix import BLOCK_ENDS, BLOCK_TOKENS, cached_tokens
from serve_app.request import PromptShape

blocks = st.integers(0, 200)


def test_what_is_left_beyond_the_last_whole_block_is_at_most_an_eighth_of_the_match() -> None:
    later = [(end, size) for end, size in zip(BLOCK_ENDS, BLOCK_TOKENS[1:], strict=False) if end >= 4_096]
    assert later
    assert all(size <= end / 8 for end, size in later)


def test_blocks_follow_each_other_without_a_gap() -> None:
    assert [after - before for before, after in pairwise(BLOCK_ENDS)] == list(BLOCK_TOKENS[1:])


@given(blocks, st.integers(0, 300_000))
def test_no_more_token_ids_are_cached_than_there_are(count: int, prompt_tokens: int) -> None:
    shape = PromptShape(text_bytes=0, prompt_tokens=prompt_tokens)
    cached = cached_tokens(shape, count, 1.0)
    assert 0 <= cached <= prompt_tokens
    assert cached in {0, prompt_tokens, *BLOCK_ENDS}
