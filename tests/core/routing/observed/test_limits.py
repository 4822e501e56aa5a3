"""Limits learned from the starts of answers."""

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from serve_app.core.routing.observed.limits import AnswerStart, ObservedLimits


def start(seconds: float = 0.1, **changes: object) -> AnswerStart:
    values: dict[str, object] = {
        "seconds": seconds,
        "explained_s": 0.1,
        "iteration_s": 0.03,
        "overtaken": False,
        "running": 10,
        "unstarted": 4,
        "peak_tokens": 0,
    }
    return AnswerStart(**{**values, **changes})  # type: ignore[arg-type]


def test_starts_in_time_widen_a_used_window_by_half_per_round_trip() -> None:
    limits = ObservedLimits()
    for _ in range(4):
        assert not limits.on_start(start(unstarted=5), 1.0)
    assert limits.window == 5.0
    for _ in range(6):
        limits.on_start(start(unstarted=8), 2.0)
    assert limits.window == 8.0


@pytest.mark.parametrize("changes", [{"unstarted": 3}, {"seconds": 0.3, "explained_s": 0.4}])
def test_an_unused_window_and_slow_starts_widen_nothing(changes: dict[str, object]) -> None:
    limits = ObservedLimits()
    limits.window = 5.0
    limits.on_start(start(**{"seconds": 0.1, **changes}), 1.0)  # type: ignore[arg-type]
    assert limits.window == 5.0


def test_a_start_is_late_beyond_the_prompts_in_flight_an_iteration_and_the_round_trip() -> None:
    assert not start(0.1 + 0.03 + 0.05).is_late
    assert start(0.1 + 0.03 + 0.051).is_late
    # A long prompt is not late beside short ones.
    assert not start(2.0, explained_s=2.0).is_late


def test_two_late_starts_in_a_row_show_a_full_engine() -> None:
    limits = ObservedLimits()
    assert not limits.on_start(start(1.0), 1.0)
    assert not limits.on_start(start(), 1.1)
    assert not limits.on_start(start(1.0), 1.2)
    assert limits.on_start(start(1.0), 1.3)


def test_overtaken_requests_show_nothing() -> None:
    limits = ObservedLimits()
    assert not any(limits.on_start(start(1.0, overtaken=True), float(at)) for at in range(8))


def test_requests_sent_before_the_last_observation_show_nothing_new() -> None:
    limits = ObservedLimits()
    limits.on_start(start(1.0), 1.0)
    assert limits.on_start(start(1.0), 1.0)
    limits.on_full(10, 5_000, 1.0)
    assert not limits.on_start(start(1.0), 1.9)
    assert limits.on_start(start(1.0), 2.1)


def test_the_resource_whose_use_repeats_is_the_limit() -> None:
    batch, cache = ObservedLimits(), ObservedLimits()
    for running, tokens in ((16, 9_000), (15, 4_000), (16, 12_000)):
        batch.on_full(running, tokens, 1.0)
    assert (batch.batch, batch.kv_tokens) == (16, None)
    for running, tokens in ((60, 58_000), (30, 56_000), (45, 59_000)):
        cache.on_full(running, tokens, 1.0)
    assert (cache.batch, cache.kv_tokens) == (None, 56_000.0)


def test_without_agreement_the_last_number_of_sequences_is_the_limit() -> None:
    limits = ObservedLimits()
    limits.on_full(40, 20_000, 1.0)
    assert limits.batch == 40
    limits.on_full(100, 70_000, 2.0)
    assert (limits.batch, limits.kv_tokens) == (100, None)


def test_more_running_sequences_raise_the_batch() -> None:
    limits = ObservedLimits()
    limits.on_full(10, 5_000, 1.0)
    limits.on_start(start(running=13), 2.0)
    assert limits.batch == 13


def test_a_full_engine_narrows_the_window() -> None:
    limits = ObservedLimits()
    limits.window = 40.0
    limits.on_full(10, 5_000, 1.0)
    assert limits.window == 3.0


def test_a_learned_cache_grows_only_while_it_is_used_and_faster_after_each_turnover() -> None:
    limits = ObservedLimits()
    for running in (30, 60):
        limits.on_full(running, 50_000, 1.0)
    limits.on_start(start(peak_tokens=30_000), 2.0)
    assert limits.kv_tokens == 50_000
    grown = []
    for _ in range(6):
        before = limits.kv_tokens
        for _ in range(10):
            limits.on_start(start(peak_tokens=1 << 30), 3.0)
        grown.append(limits.kv_tokens / before - 1)
    assert grown[0] == pytest.approx(0.005, rel=0.01)
    assert all(after > 1.9 * before for before, after in itertools.pairwise(grown))
    limits.on_full(45, 52_000, 4.0)
    assert limits.kv_tokens == 50_000


@dataclass
class Engine:
    """An engine that begins in order while its batch and cache have room, and ends answers at random."""

    batch: int
    cache: int
    rng: random.Random
    limits: ObservedLimits = field(default_factory=ObservedLimits)
    waiting: deque[tuple[float, int]] = field(default_factory=deque)
    running: list[int] = field(default_factory=list)
    now: float = 0.0
    most: tuple[int, int] = (0, 0)

    def step(self) -> None:
        self.now += 0.1
        self.running = [tokens for tokens in self.running if self.rng.random() > 0.05]
        while self.waiting and len(self.running) < self.batch:
            sent_at, tokens = self.waiting[0]
            if sum(self.running) + tokens > self.cache:
                break
            self.waiting.popleft()
            self.running.append(tokens)
            self.most = max(self.most[0], len(self.running)), max(self.most[1], sum(self.running))
            one = start(
                self.now - sent_at,
                running=len(self.running),
                unstarted=len(self.waiting) + 1,
                peak_tokens=sum(self.running),
            )
            if self.limits.on_start(one, self.now):
                self.limits.on_full(len(self.running), sum(self.running), self.now)

    def send(self) -> None:
        limits = self.limits
        while len(self.waiting) < 200:
            tokens = self.rng.choice((200, 300, 3_000))
            if limits.batch is not None:
                allowed = len(self.running) + len(self.waiting) < limits.batch + 3
            else:
                allowed = len(self.waiting) < int(limits.window)
            held = sum(self.running) + sum(each for _, each in self.waiting)
            if not allowed or (limits.kv_tokens is not None and held + tokens > limits.kv_tokens):
                break
            self.waiting.append((self.now, tokens))


@pytest.mark.parametrize(("batch", "cache"), [(4, 10**9), (64, 10**9), (1_000, 20_000), (1_000, 60_000)])
@pytest.mark.parametrize("seed", range(3))
def test_limits_are_never_above_what_has_run_and_the_hidden_queue_stays_short(
    batch: int, cache: int, seed: int
) -> None:
    engine = Engine(batch, cache, random.Random(seed))
    queues = []
    for _ in range(600):
        engine.send()
        engine.step()
        limits = engine.limits
        assert limits.batch is None or limits.batch <= engine.most[0]
        queues.append(len(engine.waiting))
    # It is full nearly all the time, and others wait before the engine rather than in it.
    full = engine.most[0] == batch or engine.most[1] > 0.9 * cache
    assert full
    assert sorted(queues[100:])[len(queues[100:]) * 9 // 10] <= 6


def test_non_streamed_answers_have_a_window_of_their_own() -> None:
    limits = ObservedLimits()
    for at in range(10):
        limits.on_whole_answer(500, 1.0, float(at), in_flight=int(limits.unstreamed))
    assert limits.unstreamed == 18.0
    # Twice the usual time and 0.25 s are not exceeded.
    limits.on_whole_answer(500, 2.25, 20.0, in_flight=18)
    assert limits.unstreamed == 19.0
    limits.on_whole_answer(500, 2.3, 30.0, in_flight=19)
    # One that was sent before.
    limits.on_whole_answer(500, 9.0, 31.0, in_flight=19)
    assert limits.unstreamed == 0.9 * 19
    limits.on_whole_answer(500, 1.0, 40.0, in_flight=18)
    assert limits.unstreamed == pytest.approx(0.9 * 19 + 0.05)
    limits.on_whole_answer(500, 1.0, 41.0, in_flight=5)
    assert limits.unstreamed == pytest.approx(0.9 * 19 + 0.05)
    assert limits.window == 3.0


def test_non_streamed_answers_of_other_sizes_are_not_compared() -> None:
    limits = ObservedLimits()
    for at in range(8):
        limits.on_whole_answer(100, 0.1, 10.0 * at, in_flight=1)
    limits.on_whole_answer(30_000, 8.0, 100.0, in_flight=1)
    assert limits.unstreamed == 8.0


def test_the_window_of_non_streamed_answers_never_ends_below_one() -> None:
    limits = ObservedLimits()
    for power in range(20):
        limits.on_whole_answer(500, 4.0**power, 8.0**power, in_flight=1)
    assert limits.unstreamed == 1.0
