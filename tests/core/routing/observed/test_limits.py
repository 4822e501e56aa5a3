"""Limits learned from the starts of answers."""

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from serve_app.core.routing.observed import AnswerStart, LearnedLimit, compare


def start(seconds: float, at: float = 1.0, *, kind: int = 1, in_flight: int = 5) -> AnswerStart:
    return AnswerStart(kind, at, seconds, in_flight, unstarted=1)


def test_answers_are_compared_with_those_of_their_kind_only() -> None:
    few = [start(1.0), start(1.2), start(9.0, kind=2), start(9.5, kind=2)]
    many = [start(2.0), start(2.2), start(9.1, kind=2), start(9.6, kind=2), start(50.0, kind=3)]
    deviations, delay_s = compare(few, many)
    # A second for one kind, a tenth of a second for the other; the third has nothing to compare with.
    assert 0.1 < delay_s < 1.0
    assert 0 < deviations < 3
    assert compare(few, [start(50.0, kind=3)]) == (0.0, 0.0)


def test_one_outlier_is_no_significant_delay() -> None:
    deviations, delay_s = compare([start(1.0)] * 16, [*[start(1.0)] * 15, start(90.0)])
    assert deviations < 1.5
    assert delay_s == 0.0


@dataclass
class Slots:
    """An engine that begins requests in order while it has free slots, behind a client that always has more.

    A first token takes a drawn time from the begin of its request, and the rest of the answer two seconds.
    """

    slots: int | None
    sigma: float
    rng: random.Random
    rate_per_s: float
    learned: LearnedLimit = field(default_factory=LearnedLimit)
    now: float = 0.0
    started: int = 0
    most: int = 0
    _queue: deque[tuple[float, int, int]] = field(default_factory=deque)
    _busy: int = 0
    _unstarted: int = 0
    _events: list[tuple[float, int, str, tuple[float, int, int]]] = field(default_factory=list)
    _backlog: int = 0

    def run(self, until: float) -> None:
        """Play to a time."""
        self._schedule(self.now, "arrival", (0.0, 0, 0))
        while self.now < until:
            self.now, _, what, sent = heapq.heappop(self._events)
            getattr(self, f"_{what}")(sent)
            self._send()

    @property
    def in_flight(self) -> int:
        return self._busy + len(self._queue)

    def _schedule(self, at: float, what: str, sent: tuple[float, int, int]) -> None:
        heapq.heappush(self._events, (at, self.rng.getrandbits(30), what, sent))

    def _arrival(self, sent: tuple[float, int, int]) -> None:
        self._backlog += 1
        self._schedule(self.now + self.rng.expovariate(self.rate_per_s), "arrival", sent)

    def _send(self) -> None:
        while self._backlog and self.learned.admits(self.in_flight, self._unstarted):
            self._backlog -= 1
            self._unstarted += 1
            self._queue.append((self.now, self.in_flight + 1, self._unstarted))
            self.most = max(self.most, self.in_flight)
            self._begin()

    def _begin(self) -> None:
        while self._queue and (self.slots is None or self._busy < self.slots):
            self._busy += 1
            first_s = 0.4 * self.rng.lognormvariate(0.0, self.sigma)
            self._schedule(self.now + first_s, "first", self._queue.popleft())

    def _first(self, sent: tuple[float, int, int]) -> None:
        sent_at, in_flight, unstarted = sent
        self._unstarted -= 1
        self.started += 1
        running = self.in_flight - self._unstarted
        self.learned.on_start(AnswerStart(1, self.now, self.now - sent_at, in_flight, unstarted, running))
        self._schedule(self.now + 2.0, "end", sent)

    def _end(self, _sent: tuple[float, int, int]) -> None:
        self._busy -= 1
        self.learned.on_departure(self.now)
        self._begin()


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_an_engine_without_a_limit_gets_none(sigma: float, seed: int) -> None:
    engine = Slots(None, sigma, random.Random(seed), rate_per_s=20.0)
    engine.run(120.0)
    assert engine.learned.limit is None
    assert engine._backlog == 0


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_slots_are_found_and_used(slots: int, sigma: float) -> None:
    mean_s = 0.4 * 1.13 + 2.0
    engine = Slots(slots, sigma, random.Random(1), rate_per_s=1.3 * slots / mean_s)
    engine.run(max(120.0, 200 * mean_s / slots))
    assert engine.learned.limit is not None
    assert slots <= engine.learned.limit <= 1.15 * slots + 0.5
    before, at = engine.started, engine.now
    engine.run(at + 100 * mean_s / slots)
    # Tests of other limits cost next to nothing.
    assert engine.started - before >= 0.95 * slots * (engine.now - at) / mean_s
    assert not engine.learned.counts_unstarted


def test_a_limit_is_withdrawn_once_the_engine_has_more_slots() -> None:
    engine = Slots(4, 0.5, random.Random(2), rate_per_s=2.4)
    engine.run(120.0)
    assert engine.learned.limit in (4, 5)
    engine.slots = None
    # Pauses between tests are at most some minutes long.
    engine.run(1_200.0)
    assert engine.learned.limit is None
    assert engine._backlog == 0


def test_an_engine_that_slows_down_at_any_load_keeps_no_limit() -> None:
    engine = Slots(None, 0.3, random.Random(3), rate_per_s=10.0)
    engine.run(60.0)
    first = Slots._begin

    def slower(self: Slots) -> None:
        while self._queue:
            self._busy += 1
            self._schedule(self.now + 1.6 * self.rng.lognormvariate(0.0, 0.3), "first", self._queue.popleft())

    try:
        Slots._begin = slower  # type: ignore[method-assign]
        engine.run(300.0)
    finally:
        Slots._begin = first  # type: ignore[method-assign]
    assert engine.learned.limit is None
    assert engine._backlog == 0


def test_a_rejection_is_a_limit_at_once_and_one_within_it_is_none() -> None:
    learned = LearnedLimit()
    assert learned.on_rejection(7, sent_at=0.5, now=1.0)
    assert learned.limit == 7
    # It was sent before the limit was known.
    assert learned.on_rejection(6, sent_at=0.9, now=1.1)
    assert learned.limit == 6
    # One within the limit shows that its number of requests is not what the engine limits.
    assert not learned.on_rejection(3, sent_at=1.2, now=1.3)
    assert learned.limit is None
    assert not learned.on_rejection(9, sent_at=1.4, now=1.5)
    assert learned.limit is None
