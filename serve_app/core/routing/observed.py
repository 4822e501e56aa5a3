"""Limits and liveness of engines that do not report them, observed from their requests.

Liveness: whether an engine hangs. An engine that hung while idle reports no requests and passes health
checks, because its front end is another process, so only its requests can show it. A sign of life is the
first token or the end of any answer, or a report that the engine has computed. An engine with outstanding
first tokens and no sign of life for `limit_s` is considered hung. Its requests are not affected, but it
receives no others. Once it has none, it receives one at a time, until one of them is answered.

False positives: a server without metrics that takes longer than the limit for one prompt. For that reason no
request is rejected because of a hang; requests wait as for a busy server.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

from serve_app.core.routing.replica import ReplicaReport


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

    @property
    def outstanding(self) -> int:
        """Number of first tokens that are outstanding."""
        return self._outstanding

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


# Limits of an engine that reports neither its queue nor its batch size, learned from the starts of answers.
#
# The queue of such an engine is hidden, and requests in it can no longer be reordered. Streamed answers show
# their start, so the requests without a first token bound the hidden queue. Their limit is a *window*:
#
# - An answer that starts in time while the window is used widens it. The window grows by half per round trip,
#   so a burst fills an engine within a few. It no longer grows once starts take `_FAST_S`.
# - An answer is *late* if it took longer to start than the engine needs for all prompt tokens that were in
#   flight with it, at the learned cost of a prefill. An overtaken request does not count: engines begin
#   requests in order, so the engine was computing its prompt.
# - `_LATE_IN_A_ROW` late answers in a row show that the engine was *full*. The window becomes
#   `_LEAST_WINDOW`, and the sequences and KV tokens in use are an observation of its capacity.
#
# The observations tell which resource was exhausted: the one whose use was the same each time.
#
# - The batch: its size is the most sequences that ran together in them, and it limits the requests in flight
#   as a reported one does. It is raised as soon as more run.
# - The KV cache: its size is the least use in them. It is the budget of the ledger, as a reported size is. It
#   grows slowly while it is used and answers start in time, and faster after each turnover of the batch.
#
# An answer that is not streamed starts at its end. These have a window of their own (AIMD). An end in time
# widens it by one, or by `_SLOW_INCREASE` after the first late one. A late end sets it to `_DECREASE_RATIO`
# of the requests in flight. *Late* is more than `_LATE_FACTOR` times the lower quartile of answers with as
# many tokens, plus `_LATE_SLACK_S`.
#
# Sources: growth per round trip until the first sign of a queue, as slow start (Jacobson 1988). Delay beyond
# that of an empty queue as the sign, as TCP Vegas (Brakmo and Peterson 1995). A capacity from what was in
# flight when the queue appeared, as BBR (Cardwell et al. 2016). AIMD on latency, as `AIMDLimit` of Netflix's
# concurrency-limits.


_NEVER = float("-inf")
# Share of a limit in use from which it counts as used.
_USED_RATIO = 0.8
# The window of an engine that is full, or whose size is unknown: it may be a laptop. As `target_waiting`.
_LEAST_WINDOW = 3.0
_WIDENING = 0.5
# A start that takes longer gives the engine no more work by a wider window, only a longer queue.
_FAST_S = 0.25
# A start is late if it took longer than is explained, by an iteration and this much for the round trip.
_ROUND_TRIP_S, _USUAL_ITERATION_S = 0.05, 0.05
_LATE_IN_A_ROW = 2
# Observations of a full engine that are kept, and the share by which a resource's uses may differ.
_CAPACITIES, _AGREEMENT = 8, 0.8
# Growth of the learned KV size per turnover of the batch. It doubles with each turnover without a late start.
_KV_GROWTH = 0.005

# Answers that are not streamed.
_FIRST_UNSTREAMED = 8.0
_MAX_OBSERVATIONS, _MIN_OBSERVATIONS = 32, 4
_LATE_FACTOR, _LATE_SLACK_S, _DECREASE_RATIO = 2.0, 0.25, 0.9
# Growth per answer after the first late one: their times are too coarse to find a limit quickly.
_SLOW_INCREASE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStart:
    """The start of one streamed answer.

    Attributes:
        seconds: time since its dispatch.
        explained_s: time to compute all prompt tokens that were in flight with it.
        iteration_s: time per iteration of the engine; None if unknown.
        overtaken: whether the answer of a request that was sent later has started before.
        running: requests in the engine whose answer has started, this one included.
        unstarted: streamed requests whose answer has not started, this one included.
        peak_tokens: forecast peak of the KV cache by the requests in the engine.
    """

    seconds: float
    explained_s: float
    iteration_s: float | None
    overtaken: bool
    running: int
    unstarted: int
    peak_tokens: int

    @property
    def is_late(self) -> bool:
        """True if it took clearly longer than the prompt tokens in flight explain."""
        iteration_s = self.iteration_s or _USUAL_ITERATION_S
        return self.seconds > self.explained_s + iteration_s + _ROUND_TRIP_S


class ObservedLimits:
    """The learned limits of one engine.

    Attributes:
        window: limit of streamed requests whose answer has not started.
        unstreamed: limit of other requests in flight.
        batch: sequences that fill the batch; None while unknown.
        kv_tokens: size of the KV cache; None while unknown.
        most_running: the most sequences that have run at once.
    """

    def __init__(self) -> None:
        self.window = _LEAST_WINDOW
        self.unstreamed = _FIRST_UNSTREAMED
        self.batch: int | None = None
        self.kv_tokens: float | None = None
        self.most_running = 0
        self._late_in_a_row = 0
        self._full_at = _NEVER
        self._capacities: deque[tuple[int, int]] = deque(maxlen=_CAPACITIES)
        self._kv_growth, self._starts = _KV_GROWTH, 0
        self._usual: dict[int, deque[float]] = {}
        self._decreased_at = _NEVER

    def __repr__(self) -> str:
        return f"<ObservedLimits window={self.window:.1f} batch={self.batch} kv_tokens={self.kv_tokens}>"

    def on_start(self, start: AnswerStart, now: float) -> bool:
        """Learn from the start of a streamed answer. Return whether it shows a full engine: see `on_full`."""
        self.most_running = max(self.most_running, start.running)
        if self.batch is not None:
            self.batch = max(self.batch, start.running)
        if start.is_late:
            self._late_in_a_row += not start.overtaken
            # Requests sent before the last observation waited for the same capacity.
            return self._late_in_a_row >= _LATE_IN_A_ROW and now - start.seconds > self._full_at
        self._late_in_a_row = 0
        if start.seconds < _FAST_S and start.unstarted >= min(_USED_RATIO * self.window, int(self.window)):
            self.window += _WIDENING
        if self.kv_tokens is not None and start.peak_tokens >= _USED_RATIO * self.kv_tokens:
            self._grow_kv(self.kv_tokens, start.running)
        return False

    def on_full(self, running: int, used_tokens: int, now: float) -> None:
        """Observe the capacity of a full engine: its running sequences and their tokens in the KV cache."""
        self.window, self._full_at = _LEAST_WINDOW, now
        self._kv_growth, self._starts = _KV_GROWTH, 0
        self._capacities.append((running, used_tokens))
        sequences, tokens = zip(*self._capacities, strict=True)
        # Two starts in one iteration differ by one sequence.
        same_sequences = (min(sequences) + 1) / (max(sequences) + 1)
        same_tokens = min(tokens) / max(*tokens, 1)
        if len(tokens) > 1 and same_tokens > max(same_sequences, _AGREEMENT):
            self.batch, self.kv_tokens = None, float(min(tokens))
        else:
            self.batch = max(sequences) if same_sequences >= _AGREEMENT else running
            self.kv_tokens = None

    def _grow_kv(self, kv_tokens: float, running: int) -> None:
        self.kv_tokens = kv_tokens * (1 + self._kv_growth / running)
        self._starts += 1
        if self._starts >= running:
            self._kv_growth, self._starts = min(1.0, 2 * self._kv_growth), 0

    def on_whole_answer(self, tokens: int, seconds: float, now: float, *, in_flight: int) -> None:
        """Learn from an answer that was not streamed.

        Args:
            tokens: prompt and output tokens, weighted by their time.
            seconds: time since its dispatch.
            in_flight: requests in the engine that are not streamed, this one included.
        """
        if self._is_late(tokens, seconds):
            # A request sent before the last decrease waited behind requests that the limit no longer allows.
            if now - seconds > self._decreased_at:
                self.unstreamed = max(1.0, _DECREASE_RATIO * min(self.unstreamed, in_flight))
                self._decreased_at = now
        elif in_flight >= min(_USED_RATIO * self.unstreamed, int(self.unstreamed)):
            self.unstreamed += 1.0 if self._decreased_at == _NEVER else _SLOW_INCREASE

    def _is_late(self, tokens: int, seconds: float) -> bool:
        """Return whether an answer took longer than usual, before it is added to the observations."""
        seen = self._usual.setdefault(max(tokens, 1).bit_length(), deque(maxlen=_MAX_OBSERVATIONS))
        usual_s = sorted(seen)[len(seen) // 4] if len(seen) >= _MIN_OBSERVATIONS else float("inf")
        seen.append(seconds)
        return seconds > _LATE_FACTOR * usual_s + _LATE_SLACK_S


# The size of an engine's batch, learned from its reports if it does not report the limit.
#
# An engine with queued requests runs as many as it can. If several consecutive reports show a queue and the
# same number of running sequences, that number is the batch size. Reports with a nearly full KV cache are
# ignored, because the cache is another reason for a queue.
#
# A long prefill can also hold others back for a while, and then the number is too low. It is discarded once
# more sequences run, which happens because an engine always receives a few requests beyond its batch.


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


# The context limit of an engine that does not report it, learned from rejected and served requests.
#
# A rejection usually states the limit in its message. Otherwise the rejected request is longer than the
# limit, and every served request is not. The limit therefore lies between the longest served and the shortest
# rejected one.
#
# Lengths of served requests are counted by engines, those of rejected ones are estimates:
# - The estimate of a rejected request is an upper one, since the limit is below the request's real length.
# - If another engine serves the request later, its count replaces all estimates.
# - A learned limit that a longer served request contradicts is discarded.
#
# Learned limits only affect the choice of a pool. They reject nothing, so a limit that is too low costs a
# detour at worst. A reported or configured limit is never changed.


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


# The time per output token of an engine that does not report it, measured from its streamed answers.
#
# A streamed answer gives the pace at its end, from its tokens and the time since its first one. The median of
# recent answers is used, so that a client that reads slowly, and delays its own stream, does not distort it.
#
# The pace is unknown with fewer than three answers in the last ten seconds, because the batch may have
# changed since.


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
