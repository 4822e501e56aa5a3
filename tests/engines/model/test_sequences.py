import pytest

from serve_app.engines.model.model import BlockName, KVBlocks, SchedulingPolicy, WaitingQueue
from tests.engines.model.builders import names, sequence, settings


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"kv_tokens": 100, "max_model_len": 128}, "max_model_len \\(128\\) does not fit"),
        ({"max_num_seqs": 300, "max_num_batched_tokens": 256}, "raise the first or lower the second"),
        ({"long_prefill_token_threshold": -1}, "got -1"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_rejected_with_a_remedy(values: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        settings(**values)


def test_the_cache_is_rounded_down_to_whole_blocks() -> None:
    assert settings(kv_tokens=4_127, block_size=16).kv_blocks == 257


def test_any_sequence_can_be_taken_out() -> None:
    for policy in SchedulingPolicy:
        queue = WaitingQueue(policy)
        members = [sequence(name, at=index) for index, name in enumerate("abc")]
        for index, member in enumerate(members):
            member.number = index
            queue.add(member)
        queue.remove(members[0])
        assert queue.head() is members[1]
        assert names(queue) == ["b", "c"]


def cached(pool: KVBlocks, *names: BlockName) -> None:
    """Compute these blocks for a sequence that then ends."""
    pool.allocate(len(names))
    assert all(pool.name(name) for name in names)
    pool.release(0, names)


def test_cached_blocks_count_as_free_until_they_are_taken() -> None:
    pool = KVBlocks(4)
    cached(pool, 1, 2)
    assert pool.free == 4
    pool.allocate(3)
    assert pool.free == 1
    assert pool.count_hits([1, 2], 2) == 1


def test_the_end_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = KVBlocks(4)
    cached(pool, 1, 2)
    cached(pool, 3, 4)
    pool.allocate(1)
    assert (pool.count_hits([1, 2], 2), pool.count_hits([3, 4], 2)) == (1, 2)
    pool.allocate(1)
    assert (pool.count_hits([1, 2], 2), pool.count_hits([3, 4], 2)) == (0, 2)


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = KVBlocks(2)
    cached(pool, 7)
    pool.share([7])
    pool.share([7])
    assert repr(pool) == "<KVBlocks total=2 free=1 cached=0 named=1>"
    pool.release(0, [7])
    assert pool.free == 1
    pool.release(0, [7])
    assert pool.free == 2


def test_hits_that_others_hold_need_no_block_of_their_own() -> None:
    pool = KVBlocks(3)
    cached(pool, 1, 2)
    pool.share([1])
    assert pool.fits(3, [1, 2])
    assert not pool.fits(4, [1, 2])
    # The same number of blocks, but one of the hits is also one of the free blocks.
    pool.allocate(1)
    assert pool.fits(2, [1, 2])
    assert not pool.fits(3, [1, 2])


def test_a_name_is_given_once() -> None:
    pool = KVBlocks(4)
    pool.allocate(2)
    assert pool.name(5)
    assert not pool.name(5)
    pool.release(1, [5])
    assert pool.free == 4


def test_a_forgotten_block_is_blank_and_a_held_one_is_not_forgotten() -> None:
    pool = KVBlocks(4)
    cached(pool, (1, 0), (1, 1))
    pool.share([(1, 0)])
    pool.discard([(1, 0), (1, 1), (1, 2)])
    assert repr(pool) == "<KVBlocks total=4 free=3 cached=0 named=1>"


def test_more_than_is_free_cannot_be_taken() -> None:
    pool = KVBlocks(2)
    with pytest.raises(ValueError, match="3 blocks wanted, only 2 of 2 are free"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="at least one block"):
        KVBlocks(0)
