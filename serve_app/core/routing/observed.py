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


# Concurrency limit for engines that expose no load metrics (AIMD).
#
# The queue of such an engine is unknown. Requests that wait in it can no longer be reordered, and too few
# leave it idle. Observable is the time until answers start. The number in flight therefore grows while
# answers start as fast as usual, and shrinks when they start late, because then they wait for each other in
# the engine.
#
# - *Usual* is the lower quartile of the last observations of similar size. It is a quantile and not a
#   minimum, because a cached prompt answers faster than any other, and because it follows an engine whose
#   speed changes.
# - *Late* is more than `_LATE_FACTOR` times the usual time, plus `_SLACK_S`.
# - On time, with the limit in use: the limit grows by one per observation until the first late one, then by
#   `_INCREASE_RATIO` of itself.
# - Late: the limit becomes `_DECREASE_RATIO` of the requests in flight. Requests sent before a decrease do
#   not cause another one.
#
# An answer that is not streamed starts at its end. Its time is compared with those of answers with as many
# tokens to compute, prompt and output together.
#
# Source: AIMD, Chiu and Jain 1989, with delay as the sign of congestion as in the limiter of Netflix's
# concurrency-limits (`AIMDLimit`). Its `Gradient2Limit`, and TCP Vegas, were simulated for comparison at
# commit 718dbd4. The quartile of similar sizes is ours.


# Retained observations of one size, and the number required before any can be late.
_MAX_OBSERVATIONS, _MIN_OBSERVATIONS = 32, 4
# Share of the limit in flight from which the limit counts as used.
_USED_RATIO = 0.8


# Chosen by simulation. The limit starts low: an engine of unknown size may be a laptop.
_START = 8
_LATE_FACTOR = 2.0
# Prefills that share an iteration delay each other by less than this.
_SLACK_S = 0.25
# Relative growth of the limit at each observation, and its minimum. The size of a large engine must be found
# quickly, and a small one must not be overloaded.
_INCREASE_RATIO, _MIN_INCREASE = 1 / 160, 0.05
_DECREASE_RATIO = 0.9


class ConcurrencyLimit:
    """The adaptive concurrency limit of one engine."""

    def __init__(self) -> None:
        self.limit = float(_START)
        self._usual: dict[tuple[bool, int], deque[float]] = {}
        self._decreased_at = float("-inf")
        self._was_late = False

    def __repr__(self) -> str:
        return f"<ConcurrencyLimit {self.limit:.1f} sizes={len(self._usual)}>"

    def observe(
        self, tokens: int, seconds: float, now: float, *, in_flight: int, streamed: bool = True
    ) -> None:
        """Learn from one answer that has started.

        Args:
            tokens: tokens computed until then.
            seconds: time since its dispatch.
            in_flight: requests in the engine, this one included.
            streamed: whether it started with its first token; otherwise it arrived as a whole.
        """
        is_late = self._is_late(tokens, seconds, streamed=streamed)
        if is_late:
            # A request sent before the last decrease waited behind requests that the limit no longer allows.
            if now - seconds > self._decreased_at:
                self.limit = max(1.0, _DECREASE_RATIO * min(self.limit, in_flight))
                self._decreased_at = now
            self._was_late = True
        elif in_flight >= min(_USED_RATIO * self.limit, int(self.limit)):
            self.limit += self._increase(streamed=streamed) if self._was_late else 1.0

    def _increase(self, *, streamed: bool) -> float:
        # The times of unstreamed answers are less informative about a queue, so the limit grows more slowly.
        return max(_MIN_INCREASE, _INCREASE_RATIO * self.limit if streamed else 0.0)

    def _is_late(self, tokens: int, seconds: float, *, streamed: bool) -> bool:
        """Return whether an answer took longer than usual, before it is added to the observations."""
        key = (streamed, max(tokens, 1).bit_length())
        seen = self._usual.get(key)
        if seen is None:
            seen = self._usual[key] = deque(maxlen=_MAX_OBSERVATIONS)
        late = False
        if len(seen) >= _MIN_OBSERVATIONS:
            usual_s = sorted(seen)[len(seen) // 4]
            late = seconds > _LATE_FACTOR * usual_s + _SLACK_S
        seen.append(seconds)
        return late


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
