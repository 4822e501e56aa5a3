"""Properties of replicas that are learned from observed answers: limits, pace, interference, hangs."""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.commands import Command, EngineSilent
from serve_app.core.events import (
    Cancelled,
    DispatchFailed,
    DispatchFailure,
    Finished,
    FirstToken,
    ReplicaJoined,
)
from serve_app.core.routing.observed import (
    AnswerStart,
    LearnedBatch,
    LearnedContext,
    LearnedLimit,
    MeasuredPace,
    PrefillInterference,
    compare,
)
from serve_app.core.routing.replica import ReplicaReport
from serve_app.errors import Outcome
from tests.builders import ManualDriver, dispatched, one_replica, spec


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


# -- learned batch ----------------------------------------------------------------------------------------


def learned(*loads: tuple[int | None, int | None, float | None]) -> int | None:
    """Return the batch limit learned from reports of (waiting, running, KV use)."""
    batch = LearnedBatch()
    for waiting, running, usage in loads:
        batch.observe(ReplicaReport(received=0, waiting=waiting, running=running, kv_usage_ratio=usage))
    return batch.size


@pytest.mark.parametrize(
    ("loads", "size"),
    [
        pytest.param([(2, 16, 0.5)] * 5, 16, id="a plateau with a queue"),
        pytest.param([(2, 16, 0.5)] * 4, None, id="four reports are too few"),
        pytest.param([(2, running, 0.5) for running in range(1, 12)], None, id="a batch that still grows"),
        pytest.param([(2, 16, None)] * 5, 16, id="an unknown use of the cache"),
    ],
)
def test_a_plateau_with_a_queue_is_the_size_of_the_batch(
    loads: list[tuple[int, int, float | None]], size: int | None
) -> None:
    assert learned(*loads) == size


@pytest.mark.parametrize("load", [(0, 16, 0.5), (2, 16, 0.95), (None, 16, 0.5), (2, None, 0.5), (2, 0, 0.0)])
def test_without_a_queue_or_with_a_full_cache_nothing_is_learned(
    load: tuple[int | None, int | None, float | None],
) -> None:
    assert learned(*[load] * 9) is None


def test_a_batch_limit_that_proves_too_low_is_dropped() -> None:
    held_back = [(2, 5, 0.5)] * 5
    assert learned(*held_back) == 5
    assert learned(*held_back, (1, 6, 0.5)) is None
    assert learned(*held_back, *[(1, 6, 0.5)] * 5) == 6


# -- context limit learned from rejections and answers ----------------------------------------------------


def test_without_a_number_the_limit_is_below_the_shortest_rejected_and_not_below_the_longest_served() -> None:
    context = LearnedContext()
    context.on_served(900)
    context.on_rejection(3_000, None)
    assert context.limit_tokens == 2_999
    context.on_rejection(2_000, None)
    context.on_rejection(2_500, None)
    assert context.limit_tokens == 1_999
    # An estimate below a served length is wrong.
    context.on_rejection(800, None)
    assert context.limit_tokens == 1_999


def test_a_count_of_another_engine_replaces_estimates() -> None:
    context = LearnedContext()
    context.on_rejection(1_200, None)
    context.on_counted(2_100)
    assert context.limit_tokens == 2_099
    context.on_rejection(1_500, None)
    assert context.limit_tokens == 1_499
    context.on_counted(1_900)
    assert context.limit_tokens == 1_899


def test_a_limit_contradicted_by_a_longer_answer_is_discarded() -> None:
    context = LearnedContext()
    context.on_rejection(1_200, None)
    context.on_served(1_500)
    assert context.limit_tokens is None
    context.on_rejection(1_600, 1_024)
    assert context.limit_tokens == 1_024
    context.on_served(1_025)
    assert context.limit_tokens is None


events = st.lists(
    st.tuples(st.integers(1, 4_000), st.floats(1.0, 1.5), st.booleans(), st.booleans()),
    max_size=40,
)


@given(limit=st.integers(100, 3_000), history=events)
def test_with_true_upper_estimates_the_limit_is_between_served_and_rejected_lengths(
    limit: int, history: list[tuple[int, float, bool, bool]]
) -> None:
    context, served, rejected = LearnedContext(), 0, [10**6]
    for tokens, overestimate, states, served_elsewhere in history:
        if tokens <= limit:
            context.on_served(tokens)
            served = max(served, tokens)
            continue
        estimated = int(tokens * overestimate)
        context.on_rejection(estimated, limit if states else None)
        rejected.append(tokens if served_elsewhere else estimated)
        if served_elsewhere:
            context.on_counted(tokens)
    found = context.limit_tokens
    # The learned limit never excludes a length that is served, and stays below the longest rejected one.
    assert found is None or found >= min(limit, served)
    if found is not None:
        assert found >= limit
        assert found < max(rejected)
    if any(tokens > limit for tokens, *_ in history):
        assert found is not None


# -- time per output token, measured on streamed answers --------------------------------------------------


def test_it_is_the_median_of_recently_ended_answers() -> None:
    pace = MeasuredPace()
    for number, tpot_s in enumerate((0.05, 0.07)):
        pace.record(tpot_s, float(number))
    assert pace.tpot_s(1.0) is None
    # A slow client delays only its own stream.
    pace.record(9.0, 2.0)
    assert pace.tpot_s(2.0) == 0.07
    pace.record(0.06, 3.0)
    assert pace.tpot_s(3.0) == 0.065


def test_an_old_pace_expires() -> None:
    pace = MeasuredPace()
    for at in (0.0, 1.0, 2.0, 3.0):
        pace.record(0.2, at)
    assert pace.tpot_s(10.5) == 0.2
    assert pace.tpot_s(11.5) is None


# -- interference: delay of an engine's short requests by long prompts ------------------------------------


def observe(learned: PrefillInterference, delay_s: float, count: int, seed: int = 1) -> bool:
    """Observe starts, half of them delayed by a long prefill. Return whether interference was ever shown."""
    rng, was_shown = random.Random(seed), False
    for number in range(count):
        beside_long = number % 2 == 1
        seconds = 0.4 * math.exp(rng.gauss(0, 0.5)) + (delay_s if beside_long else 0.0)
        learned.on_start(3, seconds, beside_long=beside_long)
        was_shown |= learned.is_shown
    return was_shown


@pytest.mark.parametrize("seed", range(10))
def test_chance_is_no_interference(seed: int) -> None:
    assert not observe(PrefillInterference(), 0.0, 2_000, seed)


def test_a_delay_is_shown_until_it_ends() -> None:
    learned = PrefillInterference()
    assert observe(learned, 1.0, 100)
    assert learned.is_shown
    observe(learned, 0.0, 400)
    assert not learned.is_shown


def test_a_significant_delay_that_does_not_matter_is_none() -> None:
    learned = PrefillInterference()
    for number in range(200):
        learned.on_start(3, 1.0 + 0.05 * (number % 2), beside_long=number % 2 == 1)
    assert not learned.is_shown


# -- hang detection: engines that received requests and show no progress ----------------------------------

LIMIT_S = 60.0


def watched(**limits: Any) -> ManualDriver:
    return one_replica("e", limits={"stall_timeout_s": LIMIT_S, "max_num_seqs": None, **limits})


def report(driver: ManualDriver, seconds: int = 1, *, computes: bool | None = None) -> list[Command]:
    """Report no requests every second, as an engine does that hung while idle."""
    every = [driver.report("e", after_s=1.0, received=None, computes=computes) for _ in range(seconds)]
    return [command for commands in every for command in commands]


def hang(driver: ManualDriver) -> list[Command]:
    """Dispatch two requests without progress for longer than the limit."""
    for name in ("a", "b"):
        assert dispatched(driver.arrive(name)) == [(name, "e")]
    return report(driver, 62)


def test_an_engine_without_progress_receives_no_requests_and_is_reported_once() -> None:
    driver = watched()
    silent = [each for each in hang(driver) if isinstance(each, EngineSilent)]
    assert [each.replica_id for each in silent] == ["e"]
    assert silent[0].silent_s == pytest.approx(61.0)
    assert dispatched(driver.arrive("c")) == []


def test_a_hang_rejects_no_request() -> None:
    driver = watched()
    hang(driver)
    driver.arrive("c")
    report(driver, 60)
    assert driver.find("c").queued


@pytest.mark.parametrize("sign", ["first token", "end", "progress"])
def test_progress_opens_it_again(sign: str) -> None:
    driver = watched()
    hang(driver)
    driver.arrive("c")
    match sign:
        case "first token":
            commands = driver.feed(FirstToken("a"))
        case "end":
            commands = driver.feed(Finished("a", Outcome.COMPLETED))
        case _:
            commands = report(driver, computes=True)
    assert dispatched(commands) == [("c", "e")]
    later = commands + report(driver)
    assert [each.silent_s for each in later if isinstance(each, EngineSilent)] == [0.0]


def test_regular_progress_keeps_it_open_during_a_long_answer() -> None:
    driver = watched()
    driver.arrive("a")
    for _ in range(10):
        report(driver, 50)
        report(driver, computes=True)
    assert dispatched(driver.arrive("b")) == [("b", "e")]
    report(driver, 50)
    driver.feed(FirstToken("b"))
    report(driver, 50)
    assert dispatched(driver.arrive("c")) == [("c", "e")]


def test_an_engine_without_outstanding_answers_does_not_hang() -> None:
    driver = watched()
    driver.arrive("whole", streamed=False)
    driver.arrive("begun")
    driver.feed(FirstToken("begun"))
    report(driver, 100)
    assert dispatched(driver.arrive("c")) == [("c", "e")]


@pytest.mark.parametrize("end", ["cancelled", "put back"])
def test_time_counts_from_the_first_dispatch_to_an_idle_engine(end: str) -> None:
    driver = watched()
    driver.arrive("a")
    report(driver, 50)
    if end == "put back":
        # It is dispatched again at once, and put back.
        driver.feed(DispatchFailed("a", "e", DispatchFailure.BUSY))
    driver.feed(Cancelled("a"))
    report(driver, 20)
    assert dispatched(driver.arrive("b")) == [("b", "e")]
    report(driver, 50)
    assert dispatched(driver.arrive("c")) == [("c", "e")]
    report(driver, 12)
    assert dispatched(driver.arrive("d")) == []


def test_after_its_requests_end_it_receives_one_at_a_time_until_an_answer() -> None:
    driver = watched()
    hang(driver)
    driver.feed(Cancelled("a"))
    driver.arrive("c")
    assert driver.find("c").queued
    assert dispatched(driver.feed(Cancelled("b"))) == [("c", "e")]
    assert dispatched(driver.arrive("d")) == []
    assert dispatched(driver.feed(FirstToken("c"))) == [("d", "e")]


def test_a_replica_that_joins_again_does_not_count_as_hanging() -> None:
    driver = watched()
    hang(driver)
    driver.feed(ReplicaJoined(spec("e", "only", max_num_seqs=None, stall_timeout_s=LIMIT_S)))
    report(driver)
    assert dispatched(driver.arrive("c")) == [("c", "e")]


def test_a_hosted_engine_is_watched_too() -> None:
    driver = watched(stall_timeout_s=None)
    hang(driver)
    assert dispatched(driver.arrive("c")) == [("c", "e")]
