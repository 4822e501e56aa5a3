"""Observation of engines that do not report their limits, pace or liveness.

- `compare_kinds`: a rank test, which decides whether the values of one sample are larger than those of
  another.
- `MeasuredPace`: the time per output token, measured from streamed answers.
- `LearnedBatch`: the size of the batch, learned from reports without that limit.
- `LearnedContext`: the context limit, learned from rejected and served requests.
- `HangDetector`: liveness, observed from the engine's requests.
- `PrefillInterference`: whether a long prompt delays the other requests of an engine.
- `LearnedLimit`: the limit of an engine that reports neither its queue nor its batch size, learned from its
  answers.

`compare_kinds`. The test of Mann and Whitney (1947) works for any distribution, so a rare outlier or a wide
spread is no evidence. Values of several kinds are compared within each kind, and the results added, as by van
Elteren (1960).

`MeasuredPace`. A streamed answer gives the pace at its end, from its tokens and the time since its first one.
The median of recent answers is used, so that a client that reads slowly, and delays its own stream, does not
distort it.

The pace is unknown with fewer than three answers in the last ten seconds, because the batch may have
changed since.

`LearnedBatch`. An engine with queued requests runs as many as it can. If several consecutive reports show a
queue and the same number of running sequences, that number is the batch size. Reports with a nearly full KV
cache are ignored, because the cache is another reason for a queue.

A long prefill can also hold others back for a while, and then the number is too low. It is discarded once
more sequences run, which happens because an engine always receives a few requests beyond its batch.

`LearnedContext`. A rejection usually states the limit in its message. Otherwise the rejected request is
longer than the limit, and every served request is not. The limit therefore lies between the longest served
and the shortest rejected one.

Lengths of served requests are counted by engines, those of rejected ones are estimates:
- The estimate of a rejected request is an upper one, since the limit is below the request's real length.
- If another engine serves the request later, its count replaces all estimates.
- A learned limit that a longer served request contradicts is discarded.

Learned limits only affect the choice of a pool. They reject nothing, so a limit that is too low costs a
detour at worst. A reported or configured limit is never changed.

`HangDetector`. An engine that hung while idle reports no requests and passes health checks, because its front
end is another process, so only its requests can show it. A sign of life is the first token or the end of any
answer, or a report that the engine has computed. An engine with outstanding first tokens and no sign of life
for `limit_s` is considered hung. Its requests are not affected, but it receives no others. Once it has none,
it receives one at a time, until one of them is answered.

False positives: a server without metrics that takes longer than the limit for one prompt. For that reason no
request is rejected because of a hang; requests wait as for a busy server.

`PrefillInterference`. An engine that computes prefills in its batch delays every request of the batch by a
long one, so isolation limits those in flight. The requests of a provider, or of a server with a process for
each, do not touch each other, and such a limit would only delay long prompts. Engines that report their queue
are known to compute prefills in their batch. For others, the starts of short prompts are the evidence: recent
ones that were beside a long prefill are compared with recent ones that were not.

Their ranks are compared. The difference must be significant to be believed, and large enough to matter. The
belief ends when they no longer differ.

`LearnedLimit`. Requests in the hidden queue of such an engine can no longer be reordered, and a limit without
need delays every request. So a limit has to earn its place: it exists only while observations show that more
requests in flight bring their answers later, and no more of them.

All decisions are one comparison, of answers that were sent while few requests were in flight with answers
that were sent while more were. If the engine begins them all, they take equally long. If the surplus only
waits, each further request delays a start by the time between two starts. The answers count as *delayed* if
they start later by at least half of that. Times vary, so medians and ranks are compared, and only of like
answers (`AnswerStart.kind`).

- *Evidence.* Without a limit, recent answers are divided at their median load. If those of higher load are
  delayed, and their ranks show that this is no chance, there is a limit. It follows from the delayed answers:
  one that was sent as the n-th in flight began when all but `limit` of these n had left, so it counts how
  many had left at the usual time before its start. What is limited is either the requests in flight (slots, a
  batch) or those whose answer has not started (prefills, computed one after the other): the one whose
  estimates agree better.
- *Trial.* Answers under the new limit must no longer be delayed. Otherwise the engine has become slower for
  another reason. Then the limit is withdrawn, and the next evidence counts after a pause that doubles.
- *Tests.* While a limit is used, a lower and a higher one are tried in turn. If fewer requests start their
  answers sooner, the lower one stays. If more are not delayed, the limit rises in steps that double, and half
  above the last confirmed value it is withdrawn. The pauses grow with the length of the tests, which take
  less than a thirtieth of the time.
- *Rejections.* If the engine rejects a request, those that it has are the limit. A higher one is tried soon,
  because a rejection costs little. A rejection within the limit withdraws it: it has another reason.
- *Start.* Before the first evidence, the requests whose answer has not started have a window that doubles
  per round trip, so that a burst at an unknown engine does not enter its queue as a whole.

Sources: limits by delivered work and delay, and probing for more: TCP Vegas (Brakmo and Peterson 1995), BBR
(Cardwell et al. 2016), adaptive concurrency in Envoy and Netflix's concurrency-limits. Slow start: Jacobson
(1988). Ranks: Mann and Whitney (1947), stratified as by van Elteren (1960). The rest is ours.
"""

import bisect
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

from serve_app.core.routing.replica import ReplicaReport

Kind = TypeVar("Kind")


def rank_surplus(larger: Collection[float], smaller: Collection[float]) -> tuple[float, float]:
    """Return by how much the rank sum of one sample exceeds that of equal distributions, and its variance."""
    ordered = sorted(smaller)
    # Equal values count half.
    wins = sum(bisect_left(ordered, one) + bisect_right(ordered, one) for one in larger) / 2
    pairs = len(larger) * len(smaller)
    return wins - pairs / 2, pairs * (len(larger) + len(smaller) + 1) / 12


def rank_deviations(larger: Collection[float], smaller: Collection[float]) -> float:
    """Return the same in standard deviations. Neither sample may be empty."""
    surplus, variance = rank_surplus(larger, smaller)
    return surplus / math.sqrt(variance)


def compare_kinds(
    usual: Mapping[Kind, Sequence[float]], observed: Mapping[Kind, Sequence[float]]
) -> tuple[float, float]:
    """Compare observed values with usual ones of the same kinds.

    Returns:
        By how many standard deviations the ranks of the observed ones exceed those of equal distributions,
        and by how much their medians do. Both are over kinds that occur in both; 0 if none does.
    """
    surplus = variance = delay = weights = 0.0
    for kind in usual.keys() & observed.keys():
        low, high = usual[kind], observed[kind]
        surplus_of_kind, variance_of_kind = rank_surplus(high, low)
        # Weighted so that kinds count by their number of values.
        weight = 1 / (len(low) + len(high) + 1)
        surplus += weight * surplus_of_kind
        variance += weight**2 * variance_of_kind
        share = weight * len(low) * len(high)
        delay += share * (median(high) - median(low))
        weights += share
    if not weights:
        return 0.0, 0.0
    return surplus / math.sqrt(variance), delay / weights


_RECENT_S = 10.0
_MIN_PACES, _MAX_PACES = 3, 32


class MeasuredPace:
    """The paces of recent answers of one replica."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        # (end time, time per output token), oldest first.
        self._ended: deque[tuple[float, float]] = deque(maxlen=_MAX_PACES)

    def __repr__(self) -> str:
        return f"<MeasuredPace of {len(self._ended)} answers>"

    def record(self, tpot_s: float, now: float) -> None:
        """Add the time per output token of a completed answer."""
        self._ended.append((now, tpot_s))

    def tpot_s(self, now: float) -> float | None:
        """Return the median time per output token, or None with too few recent answers."""
        while self._ended and self._ended[0][0] <= now - _RECENT_S:
            self._ended.popleft()
        return median(tpot_s for _, tpot_s in self._ended) if len(self._ended) >= _MIN_PACES else None


# Consecutive reports that must agree: about a second.
_REPORTS = 5
_KV_FULL = 0.9


class LearnedBatch:
    """Learns `size`, the maximum number of running sequences, from consecutive reports."""

    def __init__(self) -> None:
        self.size: int | None = None
        self._running = 0
        self._agreeing = 0

    def __repr__(self) -> str:
        return f"<LearnedBatch size={self.size}>"

    def observe(self, report: ReplicaReport) -> None:
        """Learn from a report. Reports without queued and running requests are ignored."""
        running = report.running
        if not report.waiting or not running or (report.kv_usage_ratio or 0.0) > _KV_FULL:
            self._agreeing = 0
        elif running != self._running:
            self._agreeing = 1
        else:
            self._agreeing += 1
        self._running = running or 0
        if self.size is not None and self._running > self.size:
            self.size = None
        if self._agreeing >= _REPORTS:
            self.size = self._running


class LearnedContext:
    """The learned context limit of one engine. All lengths in tokens, prompt and answer together."""

    __slots__ = ("_counted", "_estimated", "_served", "_stated")

    def __init__(self) -> None:
        self._stated: int | None = None
        self._estimated: int | None = None
        self._counted: int | None = None
        self._served = 0

    def __repr__(self) -> str:
        return f"<LearnedContext {self.limit_tokens} served={self._served}>"

    @property
    def limit_tokens(self) -> int | None:
        """The longest request to send there if another engine could serve it; None for no limit."""
        if self._stated is not None:
            return self._stated
        rejected = [each for each in (self._estimated, self._counted) if each is not None]
        return max(min(rejected) - 1, self._served, 1) if rejected else None

    def on_rejection(self, tokens: int, stated_tokens: int | None) -> None:
        """Record a rejection as too long.

        Args:
            tokens: estimated length of the request.
            stated_tokens: the limit, if the rejection states it.
        """
        if stated_tokens is not None:
            self._stated = stated_tokens
        elif tokens > self._served:
            self._estimated = tokens if self._estimated is None else min(tokens, self._estimated)

    def on_counted(self, tokens: int) -> None:
        """Record the actual length of a request that was rejected here and served elsewhere."""
        self._estimated = None
        if tokens > self._served:
            self._counted = tokens if self._counted is None else min(tokens, self._counted)

    def on_served(self, tokens: int) -> None:
        """Record the length of a served request, and discard limits that it contradicts."""
        self._served = max(self._served, tokens)
        self._stated = None if self._stated is not None and tokens > self._stated else self._stated
        self._estimated = (
            None if self._estimated is not None and tokens >= self._estimated else self._estimated
        )
        self._counted = None if self._counted is not None and tokens >= self._counted else self._counted


class HangDetector:
    """Detects whether a replica hangs: first tokens are outstanding and the time limit has passed."""

    __slots__ = ("_limit_s", "_no_progress_since", "_outstanding", "_reported", "hangs")

    def __init__(self) -> None:
        self.hangs = False
        self._reported = False
        self._limit_s: float | None = None
        self._outstanding = 0
        self._no_progress_since: float | None = None

    def __repr__(self) -> str:
        return f"<HangDetector outstanding={self._outstanding}{' hangs' if self.hangs else ''}>"

    def join(self, limit_s: float | None) -> None:
        """Reset a replica that has joined, except for outstanding first tokens. None disables detection."""
        self.hangs, self._limit_s, self._no_progress_since = False, limit_s, None

    def on_dispatch(self, now: float) -> None:
        """Count a dispatched request whose first token will be reported."""
        self._outstanding += 1
        if self._no_progress_since is None:
            self._no_progress_since = now

    def on_end(self) -> None:
        """Remove an outstanding first token, for any reason."""
        self._outstanding -= 1
        if not self._outstanding:
            self._no_progress_since = None

    def on_progress(self, now: float) -> None:
        """Record that the engine computes."""
        self.hangs = False
        self._no_progress_since = now if self._outstanding else None

    def is_silent_since(self, at: float) -> bool:
        """Return whether first tokens are outstanding, without a sign of life since that time."""
        return self._no_progress_since is not None and self._no_progress_since <= at

    def check(self, now: float) -> float | None:
        """Return the seconds without progress when a hang starts, 0 at its end, None without a change."""
        if self._outstanding and self._no_progress_since is None:
            self._no_progress_since = now
        no_progress_s = 0.0 if self._no_progress_since is None else now - self._no_progress_since
        if self._limit_s is not None and no_progress_s > self._limit_s:
            self.hangs = True
        if self.hangs == self._reported:
            return None
        self._reported = self.hangs
        return no_progress_s if self.hangs else 0.0


_RECENT, _LEAST, _EVERY = 64, 8, 8
# Standard deviations of the rank sum under equal times.
_SIGNIFICANT, _INSIGNIFICANT = 3.5, 1.0
_MATTERS, _MATTERS_S = 1.2, 0.01


class PrefillInterference:
    """Compares the starts of short prompts with and without a long prefill beside them.

    Attributes:
        is_shown: whether long prefills were seen to delay short prompts.
    """

    __slots__ = ("_recent", "_seen", "is_shown")

    def __init__(self) -> None:
        self.is_shown = False
        self._seen = 0
        # (seconds, whether beside a long prefill) by kind of prompt.
        self._recent: dict[int, deque[tuple[float, bool]]] = {}

    def __repr__(self) -> str:
        return f"<PrefillInterference{' shown' if self.is_shown else ''} n={self._seen}>"

    def on_start(self, kind: int, seconds: float, *, beside_long: bool) -> bool:
        """Record the start of a short prompt. Return whether the belief has changed.

        Args:
            kind: prompts of one kind take about the same time.
        """
        recent = self._recent.get(kind)
        if recent is None:
            recent = self._recent[kind] = deque(maxlen=_RECENT)
        recent.append((seconds, beside_long))
        self._seen += 1
        if self._seen % _EVERY:
            return False
        beside = [each for each, is_beside in recent if is_beside]
        alone = [each for each, is_beside in recent if not is_beside]
        if min(len(beside), len(alone)) < _LEAST:
            return False
        deviations = rank_deviations(beside, alone)
        matters = median(beside) > _MATTERS * median(alone) + _MATTERS_S
        before = self.is_shown
        if deviations > _SIGNIFICANT and matters:
            self.is_shown = True
        elif deviations < _INSIGNIFICANT:
            self.is_shown = False
        return self.is_shown != before


_NEVER = float("-inf")
# Recent answers in which evidence is looked for, how often, how many are compared at least, and how many of
# the lowest loads are kept for how long.
_RECENT_STARTS, _STARTS_PER_TEST, _LEAST_STARTS, _LOWEST, _MAX_AGE_S = 32, 4, 8, 40, 300.0
# Standard deviations of the rank sum that are evidence, and those that end a test of a higher limit, early or
# at its end.
_SIGNIFICANT_DELAY, _SUSPICIOUS, _LIKELY = 3.5, 2.5, 1.5
# Part of the expected delay, or of the expected gain, from which it counts.
_PART, _TRIAL_PART = 0.5, 0.25
# Answers that decide a trial: as many as the limit, within these bounds. The fewest of a suspicion.
_FEWEST, _MOST, _SUSPECTS = 8, 16, 3
# Ratio of rates above which they count as equal.
_SAME_RATE = 0.65
# Growth of the running requests per start that shows that slots are free.
_GROWTH = 0.5
# Lower limits that are tried, and the first step to higher ones, as a share of the limit.
_FIRST_LOWER, _LOWER, _STEP_RATIO = 0.5, 0.75, 0.125
# Rise above the last confirmed limit that ends it: by this ratio, and by this number.
_WITHDRAW_RATIO, _WITHDRAW = 1.5, 4
_FIRST_PAUSE_S, _MAX_PAUSE_S, _PAUSES_PER_TEST = 5.0, 60.0, 30.0
_REJECTION_PAUSE_S = 1.0
_FIRST_HOLD_S, _MAX_HOLD_S = 10.0, 600.0
_FIRST_WINDOW, _MAX_WINDOW = 32.0, 4_096.0
_BELOW_MEDIAN = 0.45
# Share of observations of the most running requests that shows that there are no more slots.
_USUAL = 0.25
# Error of the time of a departure, seen from here.
_JITTER_S = 0.01
# Departures that are remembered; more than fit into an engine's batch.
_DEPARTURES = 2_048


class AnswerStart(NamedTuple):
    """The start of one answer; that of an answer that is not streamed is its end.

    Attributes:
        kind: answers of one kind take about the same time; None for one that cannot be compared.
        at: time of the start.
        seconds: time since its dispatch.
        in_flight: requests on the engine at its dispatch, this one included.
        unstarted: how many of these had not started.
        running: requests that have started and not ended, this one included; 0 if it is not streamed.
    """

    kind: int | None
    at: float
    seconds: float
    in_flight: int
    unstarted: int
    running: int = 0


@dataclass(slots=True)
class _Trial:
    """A lower limit that is tried.

    Attributes:
        before: the limit before; None for none.
        load: the load before, or that limit.
        interval_s: time between two starts before.
        answers: answers that were sent at that load.
    """

    before: int | None
    load: float
    interval_s: float
    answers: list[AnswerStart]


class LearnedLimit:
    """The learned limit of one engine.

    Attributes:
        limit: the limit; None while there is no evidence of one.
        counts_unstarted: whether it limits requests whose answer has not started, not all in flight.
        since: time of its evidence.
        delay_s: delay of the answers that are its evidence; 0 if a rejection is.
        window: requests without a start that may be sent while there is no limit.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.counts_unstarted = False
        self.since = 0.0
        self.delay_s = 0.0
        self.window = _FIRST_WINDOW
        # Without a limit all recent answers, else those that were sent at the limit.
        self._recent: deque[AnswerStart] = deque(maxlen=_RECENT_STARTS)
        # Without a limit, the answers that were sent at the lowest loads, in the order of their loads.
        self._few: list[AnswerStart] = []
        self._seen = 0
        self._ended: deque[float] = deque(maxlen=_DEPARTURES)
        self._started: deque[float] = deque(maxlen=_DEPARTURES)
        self._running: deque[int] = deque(maxlen=2 * _RECENT_STARTS)
        self._changed_at = _NEVER
        self._trial: _Trial | None = None
        # Answers of the trial, or of the test of a higher limit by `_step`.
        self._tried: list[AnswerStart] = []
        self._step = self._step_at = self._base = 0
        self._first_limit, self._is_confirmed = 0, False
        self._next_is_lower = True
        self._test_s = 0.0
        self._test_at, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._hold_until, self._hold_s = _NEVER, _FIRST_HOLD_S
        self._ignored_until = _NEVER

    def __repr__(self) -> str:
        of = "unstarted" if self.counts_unstarted else "in flight"
        return f"<LearnedLimit {self.limit} {of} window={self.window:.0f}>"

    def admits(self, in_flight: int, unstarted: int) -> bool:
        """Return whether one more request may be sent."""
        if self.limit is None:
            return unstarted < self.window
        return (unstarted if self.counts_unstarted else in_flight) < self.limit + self._step

    def on_departure(self, now: float) -> None:
        """Record that a request has left the engine."""
        self._ended.append(now)

    def on_rejection(self, in_flight: int, sent_at: float, now: float) -> bool:
        """Learn that the engine has rejected a request for lack of capacity, beside so many that it has.

        Return whether that becomes the limit. A rejection within it shows another reason, such as a
        provider's limit on tokens per minute. Then the limit is withdrawn, and none is learned for a while.
        """
        if now < self._ignored_until:
            return False
        if self.limit is not None and not self._step and sent_at > self._changed_at:
            self._ignored_until = now + _MAX_HOLD_S
            if self.is_rejection:
                self._set(None, now)
            return False
        in_flight = max(1, in_flight)
        if not self.is_rejection:
            self._pause_s = _REJECTION_PAUSE_S
        self.counts_unstarted, self._trial = False, None
        self.since, self.delay_s, self._first_limit = now, 0.0, in_flight
        self._is_confirmed, self._next_is_lower = True, False
        self._test_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        self._set(in_flight, now)
        return True

    def on_start(self, start: AnswerStart) -> None:
        """Learn from the start of an answer."""
        self._started.append(start.at)
        self._running.append(start.running)
        if (limit := self.limit) is None:
            if start.unstarted > self.window / 2:
                self.window = min(self.window + 1, _MAX_WINDOW)
            if start.kind is None:
                return
            self._recent.append(start)
            self._keep_low(start)
            self._seen += 1
            if self._seen % _STARTS_PER_TEST == 0 and start.at >= self._hold_until:
                self._look_for_evidence(start.at)
        elif start.kind is None or start.at - start.seconds < self._changed_at:
            # It was sent under another limit, or shows nothing.
            return
        elif self._trial is not None:
            self._try(self._trial, start, limit)
        elif self._step:
            self._probe(start, limit)
        elif self._load(start) >= limit:
            self._recent.append(start)
            is_compared = self.is_rejection or len(self._recent) >= self._deciding
            if start.at >= self._test_at and is_compared:
                self._start_test(limit, start.at)

    def _load(self, start: AnswerStart) -> int:
        return start.unstarted if self.counts_unstarted else start.in_flight

    @property
    def is_rejection(self) -> bool:
        """True if the limit follows from a rejection, which is quick to repeat."""
        return self.limit is not None and self.delay_s == 0.0

    @property
    def _usual_pause_s(self) -> float:
        return _REJECTION_PAUSE_S if self.is_rejection else _FIRST_PAUSE_S

    @property
    def _deciding(self) -> int:
        return min(_MOST, max(_FEWEST, self.limit or 0))

    def _seconds_between_starts(self, count: int) -> float:
        """Return the mean time between the last so many starts."""
        count = min(count, len(self._started))
        return (self._started[-1] - self._started[-count]) / (count - 1)

    # Evidence

    def _keep_low(self, start: AnswerStart) -> None:
        """Keep an answer if it was sent at one of the lowest loads of the last minutes."""
        few = self._few
        if len(few) >= _LOWEST:
            if start.in_flight >= few[-1].in_flight:
                return
            few.pop()
        bisect.insort(few, start, key=lambda each: each.in_flight)

    def _look_for_evidence(self, now: float) -> None:
        """Compare recent answers with those of the lowest loads, and set a limit if they are delayed."""
        self._few = [each for each in self._few if each.at > now - _MAX_AGE_S]
        # Until there are many, the lower half.
        few = self._few[: self._seen // 2]
        many = [each for each in self._recent if each.in_flight > few[-1].in_flight] if few else []
        if min(len(few), len(many)) < _LEAST_STARTS:
            return
        deviations, delay_s = compare(few, many)
        more = median(each.in_flight for each in many) - median(each.in_flight for each in few)
        expected_s = more * self._seconds_between_starts(_RECENT_STARTS)
        if deviations < _SIGNIFICANT_DELAY or delay_s < _PART * expected_s:
            return
        # While slots are the limit, as many answers start as end. If more start, prefills are.
        self.counts_unstarted = self._running[-1] - self._running[-_MOST] > _GROWTH * _MOST
        limit = self._estimate(few, many)
        load = median(self._load(each) for each in many)
        if limit >= load:
            return
        self._set(self._most_running or limit, now)
        self._trial = _Trial(None, load, self._seconds_between_starts(len(many)), many)
        self.delay_s, self.since, self._first_limit = delay_s, now, limit
        self._is_confirmed, self._next_is_lower = False, True

    def _estimate(self, few: Sequence[AnswerStart], many: Sequence[AnswerStart]) -> int:
        """Return the limit that answers sent at a higher load show, and choose what it limits."""
        usual_s = {kind: median(seconds) for kind, seconds in _by_kind(few).items()}
        known = [each for each in many if each.kind in usual_s]
        if not known:
            return int(median(self._load(each) for each in many))
        left_at = self._started if self.counts_unstarted else self._ended
        positions = sorted(_left(each, self._load(each), left_at, usual_s[each.kind]) for each in known)
        # A request begins when another leaves, so an error of its time counts one too many, rarely too few.
        estimate = max(1, positions[int(_BELOW_MEDIAN * len(positions))])
        most = self._most_running
        is_usual = most > 0 and list(self._running).count(most) > _USUAL * len(self._running)
        return most if is_usual and estimate == most + 1 else estimate

    # Tests of a limit that is used

    @property
    def _most_running(self) -> int:
        """The most requests that the engine has recently run at once; 0 if that is unknown or no bound."""
        return 0 if self.counts_unstarted else max(self._running)

    def _start_test(self, limit: int, now: float) -> None:
        if self._next_is_lower and limit > max(1, self._most_running):
            ratio = _LOWER if self._is_confirmed else _FIRST_LOWER
            answers = list(self._recent)[-_MOST:]
            self._trial = _Trial(limit, limit, self._seconds_between_starts(len(answers)), answers)
            self._set(self._most_running or min(limit - 1, round(ratio * limit)), now)
        else:
            self._base, self._tried = limit, []
            self._start_step(max(1, int(_STEP_RATIO * limit)), now)

    def _try(self, trial: _Trial, start: AnswerStart, limit: int) -> None:
        """Record an answer under a limit that is tried, and decide."""
        if trial.before is not None and self._load(start) < limit:
            return
        self._tried.append(start)
        if len(self._tried) < self._deciding:
            return
        now, self._trial, tried = start.at, None, self._tried
        interval_s = self._seconds_between_starts(len(tried))
        # A limit that the engine has been seen to run at once costs no work.
        costs = not self._most_running and trial.interval_s < _SAME_RATE * interval_s
        if trial.before is None:
            is_used = median(map(self._load, tried)) >= limit
            expected_s = (trial.load - limit) * interval_s
            helps = compare(tried, trial.answers)[1] >= _TRIAL_PART * expected_s and not (is_used and costs)
            self._hold_until = now + self._hold_s
            self._hold_s = _FIRST_HOLD_S if helps else min(2 * self._hold_s, _MAX_HOLD_S)
            if not helps:
                self._few.clear()
                self._seen = 0
                self._set(None, now)
                return
        most = trial.before or int(trial.load)
        if costs:
            estimate = most
        elif self.counts_unstarted:
            # Unlike those of slots, the times under this limit may contain a queue.
            estimate = limit
        else:
            estimate = min(most, max(limit, self._estimate(tried, trial.answers)))
        self._first_limit = estimate
        if costs or estimate > limit or limit == 1 or self._most_running >= limit:
            self._is_confirmed, self._next_is_lower = True, False
            self._test_s, self._test_at = now - self._changed_at, now + _FIRST_PAUSE_S
        self._set(estimate, now)

    def _start_step(self, step: int, now: float) -> None:
        self._step, self._changed_at, self._step_at = step, now, len(self._tried)

    def _probe(self, start: AnswerStart, limit: int) -> None:
        """Record an answer beyond the limit, and decide whether it may rise."""
        if self._load(start) <= limit:
            return
        if self.is_rejection:
            # The engine would have rejected it.
            self._raise(limit, start.at)
            return
        self._tried.append(start)
        if len(self._tried) < _SUSPECTS:
            return
        now, step = start.at, self._step
        is_last = len(self._tried) - self._step_at >= self._deciding
        deviations, delay_s = compare(self._recent, self._tried)
        more = median(map(self._load, self._tried)) - self._base
        expected_s = more * self._seconds_between_starts(_FEWEST)
        suspicion = _LIKELY if is_last else _SUSPICIOUS
        if deviations > suspicion and delay_s >= _PART * expected_s:
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            # In proportion to the time of the tests of both kinds.
            test_s, self._test_s = self._test_s + now - self._changed_at, 0.0
            self._test_at = now + max(self._pause_s, _PAUSES_PER_TEST * test_s)
            self._next_is_lower = True
            estimate = self._estimate(self._recent, self._tried)
            least = (self._base + limit + 1) // 2
            self._set(min(limit + step, max(least, estimate)), now)
        elif is_last:
            self._raise(limit, now)

    def _raise(self, limit: int, now: float) -> None:
        """End a step that delayed nothing: withdraw the limit, or go on to the next step."""
        raised, self._pause_s = limit + self._step, self._usual_pause_s
        if raised >= max(_WITHDRAW_RATIO * self._first_limit, self._first_limit + _WITHDRAW):
            self.window = max(self.window, 2.0 * limit)
            self._set(None, now)
        else:
            self.limit = raised
            self._start_step(min(2 * self._step, limit), now)

    def _set(self, limit: int | None, now: float) -> None:
        """Set a limit, and observe the requests that are sent from now on."""
        self.limit, self._step, self._changed_at = limit, 0, now
        self._tried = []
        self._recent.clear()


def compare(few: Iterable[AnswerStart], many: Iterable[AnswerStart]) -> tuple[float, float]:
    """Compare answers that were sent at a low load with those of a higher load; see `compare_kinds`."""
    return compare_kinds(_by_kind(few), _by_kind(many))


def _by_kind(answers: Iterable[AnswerStart]) -> dict[int | None, list[float]]:
    """Return the times of answers by their kind."""
    seconds: dict[int | None, list[float]] = {}
    for each in answers:
        seconds.setdefault(each.kind, []).append(each.seconds)
    return seconds


def _left(start: AnswerStart, load: int, left_at: Iterable[float], usual_s: float) -> int:
    """Return how many of the requests that a late answer was sent with were left when it began."""
    sent_at = start.at - start.seconds
    began_at = start.at - min(usual_s, start.seconds) + _JITTER_S
    return max(1, load - sum(sent_at < one <= began_at for one in left_at))
