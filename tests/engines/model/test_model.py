"""Engine model: examples calculated by hand, and its parts.

Steps take 10 ms (2 ms without decoding), or 0.1 ms per prompt token if that is more, plus 1 ms per decoding
sequence.
"""

import pytest

from serve_app.engines.model.model import BlockName, KVBlocks, RecentMean
from tests.engines.model.builders import model, names, run_until_idle, sequence, settings, step


def test_a_sequence_prefills_decodes_and_ends() -> None:
    engine = model()
    only = sequence(prompt=32, output=3)
    engine.add(only, 1.0)

    # 32 tokens: the prompt is computed, and the first token is generated in the same step.
    assert engine.begin_step(1.0) == pytest.approx(1.0032)
    first = engine.end_step()
    assert (first.prefill_tokens, first.sequences) == (32, 0)
    assert names(first.first_tokens) == ["s"]
    # Two more tokens, one per step of 10 + 1 ms.
    assert engine.begin_step(1.0032) == pytest.approx(1.0142)
    assert names(engine.end_step().finished) == []
    assert engine.output_tokens(only) == 2
    assert engine.begin_step(1.0142) == pytest.approx(1.0252)
    assert names(engine.end_step().finished) == ["s"]

    assert (only.scheduled_at, only.output_tokens) == (1.0, 3)
    assert only.first_token_at == pytest.approx(1.0032)
    assert only.finished_at == pytest.approx(1.0252)
    assert engine.begin_step(2.0) is None


def test_a_preempted_sequence_reuses_its_blocks_that_are_still_cached() -> None:
    def prefilled(*, caching: bool) -> int:
        engine = model(max_model_len=128, kv_tokens=128, prefix_caching=caching)
        engine.add(sequence("old", 48, 40), 0.0)
        engine.add(sequence("young", 48, 40), 0.0)
        return sum(each.prefill_tokens for each in run_until_idle(engine))

    # Without the cache: 96 tokens, and 65 again. With it: `old` grows by 2 blocks of the victim's 4, the last
    # first.
    assert prefilled(caching=False) == 96 + 65
    assert prefilled(caching=True) == 96 + 65 - 32


def test_equal_prefixes_are_computed_once() -> None:
    engine = model()
    shared = tuple(range(10))
    first, second = sequence("a", 165, 2, hashes=shared), sequence("b", 165, 2, hashes=shared)
    engine.add(first, 0.0)
    assert step(engine).prefill_tokens == 165
    engine.add(second, 0.0)
    assert step(engine).prefill_tokens == 5
    assert (first.cached_tokens, second.cached_tokens) == (0, 160)
    assert engine.snapshot(0.0).prefix_hits_tokens == 160


def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    engine = model()
    for name in ("a", "b"):
        engine.add(sequence(name, 160, 2, hashes=tuple(range(10))), 0.0)
        prefilled = step(engine).prefill_tokens
    assert prefilled == 16


@pytest.mark.parametrize(
    ("answer", "steps", "cached"),
    [
        pytest.param(40, 16, 2, id="only the prompt"),
        pytest.param(40, 17, 3, id="before its end"),
        pytest.param(40, 40, 4, id="at its end"),
        pytest.param(32, 32, 3, id="not the last token, which is never computed"),
        pytest.param(33, 33, 4, id="the last but one fills a block"),
    ],
)
def test_the_blocks_of_an_answer_are_cached_when_they_are_full(answer: int, steps: int, cached: int) -> None:
    engine = model()
    blocks = tuple(range(8))
    turn = sequence("turn", 32, answer, hashes=blocks)
    engine.add(turn, 0.0)
    for _ in range(steps):
        step(engine)
    assert engine.cached_blocks(blocks) == cached
    # An aborted answer leaves the blocks that were computed, and the next prompt finds them.
    assert engine.abort(turn, 0.0) is (steps < answer)
    left = (32 + steps - 1) // 16
    assert engine.cached_blocks(blocks) == left
    assert engine.snapshot(0.0).kv_usage_ratio == 0.0
    following = sequence("next", 130, 2, hashes=blocks)
    engine.add(following, 0.0)
    assert step(engine).prefill_tokens == 130 - 16 * left
    assert following.cached_tokens == 16 * left


def test_the_answer_of_a_preempted_sequence_is_cached() -> None:
    engine = model(max_model_len=128, kv_tokens=128)
    old = sequence("old", 48, 40, hashes=tuple(range(5)))
    young = sequence("young", 48, 40, hashes=tuple(range(10, 15)))
    engine.add(old, 0.0)
    engine.add(young, 0.0)
    while old.finished_at is None:
        step(engine)
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert engine.cached_blocks(range(5)) == 5
    run_until_idle(engine)
    assert young.output_tokens == 40
    assert engine.cached_blocks(range(10, 15)) == 5


def test_equal_answers_are_cached_once() -> None:
    engine = model(kv_tokens=4_096)
    for name in ("a", "b"):
        engine.add(sequence(name, 32, 49, hashes=tuple(range(5))), 0.0)
    run_until_idle(engine)
    assert engine.cached_blocks(range(5)) == 5
    assert engine.snapshot(1e9).kv_usage_ratio == 0.0
    # All other blocks are blank: a prompt that needs all of them evicts none of these, but the next one does.
    rest = engine.settings.kv_blocks - 5
    for name, hashes, cached in (("c", range(100, 100 + rest), 5), ("d", range(9_000, 9_001), 4)):
        engine.add(sequence(name, 16 * len(hashes), 1, hashes=hashes), 1e9)
        run_until_idle(engine)
        assert engine.cached_blocks(range(5)) == cached


def test_nothing_is_cached_without_prefix_caching() -> None:
    engine = model(prefix_caching=False)
    engine.add(sequence("turn", 32, 49, hashes=tuple(range(5))), 0.0)
    run_until_idle(engine)
    assert engine.cached_blocks(range(5)) == 0


def test_the_cached_blocks_of_a_prompt_end_at_the_first_unknown_one() -> None:
    engine = model()
    engine.add(sequence("turn", 64, 1, hashes=(1, 2, 3, 4)), 0.0)
    run_until_idle(engine)
    assert engine.cached_blocks((1, 2, 9, 4)) == 2
    assert engine.cached_blocks((9, 2)) == 0
    assert engine.cached_blocks(()) == 0


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_an_aborted_sequence_frees_its_blocks_at_once(steps_before: int) -> None:
    engine = model(max_num_batched_tokens=48, max_num_seqs=4)
    gone = sequence("gone", 80, 50)
    engine.add(gone, 0.0)
    for _ in range(steps_before):
        step(engine)
    engine.begin_step(0.0)
    assert engine.snapshot(0.0).kv_usage_ratio > 0
    assert engine.abort(gone, 0.0)
    assert engine.snapshot(0.0).kv_usage_ratio == 0
    assert engine.end_step().finished == []
    assert not engine.abort(gone, 0.0)
    assert engine.begin_step(0.0) is None


def test_a_run_lasts_until_the_first_sequence_ends() -> None:
    engine = model()
    engine.add(sequence("short", 16, 11), 0.0)
    engine.add(sequence("long", 16, 21), 0.0)
    step(engine)
    # The first sequence ends in 10 tokens, at 12 ms each.
    assert engine.begin_step(1.0, max_steps=1_000) == pytest.approx(1.12)
    # A snapshot within the run counts the iterations that have ended.
    assert engine.snapshot(1.05).token_gaps == 2 * 4
    assert names(engine.end_step().finished) == ["short"]
    found = engine.snapshot(1.12)
    assert (found.iterations, found.token_gaps) == (11, 2 * 10)
    assert found.token_gaps_s == pytest.approx(2 * 0.12)
    assert engine.begin_step(1.12, max_steps=1_000) == pytest.approx(1.12 + 10 * 0.011)


def test_an_arrival_at_the_very_end_of_an_iteration_is_in_time_for_the_next() -> None:
    engine = model()
    engine.add(sequence("a", 16, 100), 0.0)
    step(engine)
    ends_at = engine.begin_step(1.0)
    assert ends_at is not None
    engine.end_step()
    engine.begin_step(1.0, max_steps=1_000)
    engine.add(sequence("b", 16, 1, at=ends_at), ends_at)
    assert engine.ends_at == pytest.approx(ends_at)


def test_a_run_ends_when_a_waiting_prompt_loses_its_cached_prefix() -> None:
    def admitted_at(max_steps: int) -> float | None:
        engine = model(
            max_model_len=192,
            kv_tokens=192,
            max_num_seqs=4,
            max_num_batched_tokens=100,
            long_prefill_token_threshold=20,
            prefix_caching=True,
            full_prompt_must_fit=False,
        )
        prefix = tuple(range(8))
        # The second block of the prefix belongs to `start`, which ends first. So it is evicted first.
        decoding = sequence("decoding", 16, 150)
        together = [sequence("rest", 128, 1, hashes=prefix), sequence("start", 32, 1, hashes=prefix[:2])]
        # Eight cached blocks and two new ones do not fit. When one is still cached, it and two others do.
        waits = sequence("waits", 160, 1, at=0.3, hashes=(*prefix, 20, 21))
        run_until_idle(engine, [decoding, *together, waits], max_steps=max_steps)
        assert waits.cached_tokens == 16
        return waits.scheduled_at

    assert admitted_at(max_steps=1_000) == pytest.approx(admitted_at(max_steps=1))


def test_a_run_shows_its_progress_before_it_ends() -> None:
    engine = model()
    only = sequence("a", 16, 100)
    engine.add(only, 0.0)
    step(engine)
    engine.begin_step(1.0, max_steps=1_000)
    before = engine.snapshot(1.0)
    assert engine.snapshot(1.5).kv_usage_ratio > before.kv_usage_ratio
    # 45 iterations of 11 ms have ended by then, and the first token came before.
    assert engine.output_tokens(only) == 46


def test_sequences_that_can_never_run_are_rejected() -> None:
    engine = model(max_model_len=100, kv_tokens=1_600)
    with pytest.raises(ValueError, match="90 \\+ 11 tokens"):
        engine.add(sequence(prompt=90, output=11), 0.0)
    with pytest.raises(ValueError, match="at least 1"):
        engine.add(sequence(prompt=0), 0.0)
    accepted = sequence(prompt=90, output=10)
    engine.add(accepted, 0.0)
    with pytest.raises(ValueError, match="is waiting"):
        engine.add(accepted, 0.0)


def test_steps_are_begun_and_ended_in_turn() -> None:
    engine = model()
    with pytest.raises(RuntimeError, match="begin one first"):
        engine.end_step()
    engine.add(sequence(), 0.0)
    engine.begin_step(0.0)
    with pytest.raises(RuntimeError, match="end it first"):
        engine.begin_step(0.0)


# -- sequences, blocks and the waiting queue --------------------------------------------------------------


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


def cached(pool: KVBlocks, *names: BlockName) -> None:
    """Compute these blocks for a sequence that then ends."""
    pool.allocate(len(names))
    pool.release(0, [pool.name(name) for name in names])


def test_the_end_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = KVBlocks(4)
    cached(pool, 1, 2)
    cached(pool, 3, 4)
    pool.allocate(1)
    assert (pool.find([1, 2], 2), pool.find([3, 4], 2)) == ([1], [3, 4])
    pool.allocate(1)
    assert (pool.find([1, 2], 2), pool.find([3, 4], 2)) == ([], [3, 4])


def test_full_blocks_without_a_name_are_evicted_in_their_turn() -> None:
    pool = KVBlocks(4)
    pool.allocate(3)
    pool.release(3, full=2)
    cached(pool, 1)
    assert repr(pool) == "<KVBlocks total=4 free=4 cached=3 named=0>"
    pool.allocate(1)
    pool.allocate(1)
    pool.allocate(1)
    assert pool.find([1], 1) == [1]
    pool.allocate(1)
    assert pool.find([1], 1) == []


def test_a_copy_serves_when_the_first_block_of_a_name_is_evicted() -> None:
    pool = KVBlocks(3)
    cached(pool, 1)
    pool.allocate(1)
    copy = pool.name(1)
    assert pool.find([1], 1) == [1]
    pool.allocate(2)
    assert pool.find([1], 1) == [copy]
    pool.release(0, [copy])
    pool.allocate(1)
    assert pool.find([1], 1) == []


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


def test_more_than_is_free_cannot_be_taken() -> None:
    pool = KVBlocks(2)
    with pytest.raises(ValueError, match="3 blocks wanted, only 2 of 2 are free"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="at least one block"):
        KVBlocks(0)


# -- recent mean ------------------------------------------------------------------------------------------


def test_a_recent_mean_forgets_what_left_the_window() -> None:
    mean = RecentMean(window_s=2.0)
    mean.record(0.0, 0, now=0.0)
    mean.record(10.0, 10, now=1.0)  # 1 each
    mean.record(12.0, 20, now=2.5)  # 0.2 each
    assert mean.mean(now=2.5) == pytest.approx(12 / 20)
    assert mean.mean(now=3.2) == pytest.approx(0.2)
    assert mean.mean(now=4.6) is None


def test_a_recent_mean_restarts_with_the_counters() -> None:
    mean = RecentMean()
    mean.record(100.0, 1_000, now=0.0)
    mean.record(0.5, 1, now=0.2)
    assert mean.mean(now=0.2) is None
    mean.record(1.5, 3, now=0.4)
    assert mean.mean(now=0.4) == pytest.approx(0.5)


def test_nothing_counted_means_no_mean() -> None:
    assert RecentMean().mean(now=5.0) is None
