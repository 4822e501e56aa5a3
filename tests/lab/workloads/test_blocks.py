import pytest

from serve_app.core.routing.prefix import BLOCK_ENDS
from serve_app.lab.workloads import engine_blocks, gateway_blocks


def common(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1),
        min(len(one), len(other)),
    )


def test_an_engine_has_several_blocks_per_id() -> None:
    blocks = list(engine_blocks((7, 9), 64, 128, 16))
    assert blocks == [28, 29, 30, 31, 36, 37, 38, 39]


def test_an_engine_has_only_full_blocks_and_only_those_of_known_ids() -> None:
    assert list(engine_blocks((7, 9), 64, 64 + 31, 16)) == [28, 29, 30, 31, 36]
    assert list(engine_blocks((7, 9), 64, 1_000, 16)) == [28, 29, 30, 31, 36, 37, 38, 39]
    assert list(engine_blocks((), 64, 1_000, 16)) == []
    assert list(engine_blocks((7,), 64, 15, 16)) == []


def test_engine_blocks_of_the_same_size_are_the_ids() -> None:
    assert list(engine_blocks((7, 9, 11), 16, 40, 16)) == [7, 9]


def test_equal_ids_give_equal_engine_blocks_up_to_the_first_difference() -> None:
    one, other = (list(engine_blocks(ids, 64, 250, 16)) for ids in ((1, 2, 3), (1, 2, 4)))
    assert common(one, other) == 8
    assert len(set(one) | set(other)) == 8 + 4 + 4


def test_a_gateway_has_the_blocks_that_end_within_known_ids() -> None:
    # 32 blocks of 128 tokens, then larger ones.
    ids = tuple(range(100))
    assert len(list(gateway_blocks(ids, 64, 6_400))) == sum(end <= 6_400 for end in BLOCK_ENDS)
    assert len(list(gateway_blocks(ids, 64, 1_000))) == 1_000 // 128
    assert len(list(gateway_blocks(ids[:5], 64, 1_000))) == 2
    assert list(gateway_blocks(ids, 64, 127)) == []


@pytest.mark.parametrize("shared", [0, 1, 2, 10, 63, 64, 80])
def test_gateway_blocks_are_equal_up_to_the_last_one_within_equal_ids(shared: int) -> None:
    ids = tuple(range(100))
    other = ids[:shared] + tuple(range(1_000, 1_100 - shared))
    blocks, others = (list(gateway_blocks(each, 64, 6_400)) for each in (ids, other))
    assert common(blocks, others) == sum(end <= 64 * shared for end in BLOCK_ENDS)
    assert len(set(blocks)) == len(blocks)
