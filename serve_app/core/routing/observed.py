"""Limits and liveness of engines that report none, observed from the requests that they are sent.

Question: has an engine hung? One that hung while it was idle states no requests and fails no check, since its
front end is another process, and only who sent requests there knows better. A sign of life is the first token
or the end of any answer, or a report that the engine has computed. An engine that owes first tokens and gives
no sign for `limit_s` is taken to hang. Nothing follows for the requests that it has; it is sent no others.
When it has none any more, it is sent one at a time, until one of them is answered.

What it may be wrong about: a server without metrics that takes longer than the limit for one prompt. So
nothing is refused for it either; requests wait as they do for a server that is busy.
"""

from collections import deque
from statistics import median

from serve_app.core.routing.replica import ReplicaReport


class AnswerWatch:
    """The watch of one replica; all times in seconds.

    Attributes:
        hangs: it owes first tokens, and has given no sign for the limit.
    """

    __slots__ = ("_limit_s", "_owed", "_silent_since", "_told", "hangs")

    def __init__(self) -> None:
        self.hangs = False
        self._told = False
        self._limit_s: float | None = None
        self._owed = 0
        self._silent_since: float | None = None

    def __repr__(self) -> str:
        return f"<AnswerWatch owed={self._owed}{' hangs' if self.hangs else ''}>"

    def join(self, limit_s: float | None) -> None:
        """The replica has joined, or joined again; what it owes it still owes.

        Args:
            limit_s: None for an engine that is watched by others.
        """
        self.hangs, self._limit_s, self._silent_since = False, limit_s, None

    def on_dispatch(self, now: float) -> None:
        """It was sent a request whose first token will be told."""
        self._owed += 1
        if self._silent_since is None:
            self._silent_since = now

    def on_end(self) -> None:
        """It owes one first token less, for whatever reason."""
        self._owed -= 1
        if not self._owed:
            self._silent_since = None

    def on_sign(self, now: float) -> None:
        """It computes."""
        self.hangs = False
        self._silent_since = now if self._owed else None

    def look(self, now: float) -> float | None:
        """How long it has been silent when it is found to hang, 0 when that is over; None without news."""
        if self._owed and self._silent_since is None:
            self._silent_since = now
        silent_s = 0.0 if self._silent_since is None else now - self._silent_since
        if self._limit_s is not None and silent_s > self._limit_s:
            self.hangs = True
        if self.hangs == self._told:
            return None
        self._told = self.hangs
        return silent_s if self.hangs else 0.0


# The concurrency limit of an engine that does not tell its load: how many requests it is sent at once.
#
# Question: how much is an engine sent whose queue nobody can see? Requests that wait in it can no longer be
# reordered, and too few leave it idle. What can be seen is how long answers take to begin. So the number in
# flight grows while they begin as fast as usual, and shrinks when they begin late: then they wait for each
# other inside the engine.
#
# - *Usual* is the lower quartile of the last observations of like size. It is a quantile and not a minimum,
#   because a cached prompt answers faster than any other; and it follows an engine whose speed changes.
# - *Late* is more than `_LATE_FACTOR` times the usual, plus `_SLACK_S`.
# - On time, and the limit is used: it grows by one for each observation until the first late one, then by
#   `_INCREASE_RATIO` of itself.
# - Late: the limit becomes `_DECREASE_RATIO` of what is in flight. Requests sent before that say nothing new.
#
# An answer that is not streamed begins when it ends. Its time is compared with others that had as much to
# compute, prompt and output together.
#
# Source: AIMD, Chiu and Jain 1989, with the delay as the sign of congestion as in the limiter of Netflix's
# concurrency-limits (`AIMDLimit`). Its `Gradient2Limit`, and TCP Vegas, were simulated beside it at commit
# 718dbd4. The quartile of like sizes is ours.


# Observations of one size that are remembered, and how many are needed before any can be late.
_REMEMBERED, _ENOUGH = 32, 4
# The limit is in use when so much of it is in flight.
_USED_RATIO = 0.8


# Chosen by simulation. The limit begins low: an engine of unknown size may be a laptop.
_START = 8
_LATE_FACTOR = 2.0
# Prefills that share an iteration delay each other by less than this.
_SLACK_S = 0.25
# Share of the limit that it grows by at each observation, but at least so much. Large engines have to be
# found fast, and a small one must not be overrun.
_INCREASE_RATIO, _LEAST_INCREASE = 1 / 160, 0.05
_DECREASE_RATIO = 0.9


class ConcurrencyLimit:
    """The limit of one engine.

    Attributes:
        limit: requests that it may have in flight; at least 1.
    """

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
        """Learn from one answer that has begun.

        Args:
            tokens: that had to be computed until then.
            seconds: since it was sent.
            in_flight: requests in the engine, this one included.
            streamed: it began with its first token; otherwise it came as a whole.
        """
        is_late = self._is_late(tokens, seconds, streamed=streamed)
        if is_late:
            # Sent before the last decrease: it waited behind what the limit no longer allows.
            if now - seconds > self._decreased_at:
                self.limit = max(1.0, _DECREASE_RATIO * min(self.limit, in_flight))
                self._decreased_at = now
            self._was_late = True
        elif in_flight >= min(_USED_RATIO * self.limit, int(self.limit)):
            self.limit += self._increase(streamed=streamed) if self._was_late else 1.0

    def _increase(self, *, streamed: bool) -> float:
        # The times of whole answers tell less of a queue, so they are followed with more care.
        return max(_LEAST_INCREASE, _INCREASE_RATIO * self.limit if streamed else 0.0)

    def _is_late(self, tokens: int, seconds: float, *, streamed: bool) -> bool:
        """Whether it took longer than usual, judged before it is counted itself."""
        key = (streamed, max(tokens, 1).bit_length())
        seen = self._usual.get(key)
        if seen is None:
            seen = self._usual[key] = deque(maxlen=_REMEMBERED)
        late = False
        if len(seen) >= _ENOUGH:
            usual_s = sorted(seen)[len(seen) // 4]
            late = seconds > _LATE_FACTOR * usual_s + _SLACK_S
        seen.append(seconds)
        return late


# The size of an engine's batch, learned from its reports where it does not state one.
#
# An engine with requests in its queue runs as many as it can. So when several reports in a row show a queue
# and the same number of running sequences, that number is the size of its batch. A KV cache that is nearly
# full is another reason to let requests wait, and teaches nothing.
#
# A long prefill can hold others back for a while too, and then the number is too low. It is dropped as soon
# as more sequences run, which happens because an engine is always sent a few requests beyond its batch.


# Reports in a row that must agree: about a second.
_REPORTS = 5
_KV_FULL = 0.9


class LearnedBatch:
    """Learns the size from one report after the other.

    Attributes:
        size: most sequences that run at once; None while it is unknown.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self._running = 0
        self._agreeing = 0

    def __repr__(self) -> str:
        return f"<LearnedBatch size={self.size}>"

    def observe(self, report: ReplicaReport) -> None:
        """Learn from a report; one that does not tell what waits and runs teaches nothing."""
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


# The context limit of an engine that does not tell it, learned from what it refuses and what it serves.
#
# Question: which requests are too long for it? A refusal mostly states the limit in its words. Where it does
# not, the refused request is longer than the limit, and every request that was served is not. So the limit
# lies between the longest served and the shortest refused.
#
# Lengths of served requests are counted by engines, those of refused ones are estimates:
# - The estimate of a refused request is an upper one, since the limit is below the request's real length.
# - When another engine serves the request afterwards, its count takes the place of all estimates.
# - Whatever was learned, and is contradicted by a longer request that is served, is forgotten.
#
# What is learned is for the choice of a pool only. Nothing is refused by it, so a limit that is learned too
# low costs a detour at worst. A limit that an engine tells, or that is configured, is never changed.


class LearnedContext:
    """What is known of one engine's limit; see above. All lengths in tokens, prompt and answer together."""

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
        """The longest request that is sent there if another engine could take it; None for any."""
        if self._stated is not None:
            return self._stated
        refused = [each for each in (self._estimated, self._counted) if each is not None]
        return max(min(refused) - 1, self._served, 1) if refused else None

    def on_refusal(self, tokens: int, stated_tokens: int | None) -> None:
        """A request of this length, estimated, was refused as too long.

        Args:
            stated_tokens: the limit, where the refusal states it.
        """
        if stated_tokens is not None:
            self._stated = stated_tokens
        elif tokens > self._served:
            self._estimated = tokens if self._estimated is None else min(tokens, self._estimated)

    def on_counted(self, tokens: int) -> None:
        """A request that was refused here has been served elsewhere, and had this length."""
        self._estimated = None
        if tokens > self._served:
            self._counted = tokens if self._counted is None else min(tokens, self._counted)

    def on_served(self, tokens: int) -> None:
        """A request of this length was served."""
        self._served = max(self._served, tokens)
        self._stated = None if self._stated is not None and tokens > self._stated else self._stated
        self._estimated = (
            None if self._estimated is not None and tokens >= self._estimated else self._estimated
        )
        self._counted = None if self._counted is not None and tokens >= self._counted else self._counted


# The time per output token of an engine that does not tell it, measured from the answers it has streamed.
#
# Question: how fast does an engine generate now? A streamed answer says so at its end, by its tokens and the
# time since its first one. The median of the answers that ended lately counts, so that a client that reads
# slowly, and holds its own stream up, does not speak for the engine.
#
# It is unknown while fewer than three answers have ended in the last ten seconds: an old pace says nothing of
# a batch that has changed since.


_LATELY_S = 10.0
_MEASURED_PACE_ENOUGH, _MEASURED_PACE_REMEMBERED = 3, 32


class MeasuredPace:
    """The paces of the answers of one replica that ended lately."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        # (when it ended, time per output token), oldest first.
        self._ended: deque[tuple[float, float]] = deque(maxlen=_MEASURED_PACE_REMEMBERED)

    def __repr__(self) -> str:
        return f"<MeasuredPace of {len(self._ended)} answers>"

    def note(self, tpot_s: float, now: float) -> None:
        """An answer has ended that had this time per output token."""
        self._ended.append((now, tpot_s))

    def tpot_s(self, now: float) -> float | None:
        """The median time per output token; None where too few answers have ended lately."""
        while self._ended and self._ended[0][0] <= now - _LATELY_S:
            self._ended.popleft()
        return (
            median(tpot_s for _, tpot_s in self._ended) if len(self._ended) >= _MEASURED_PACE_ENOUGH else None
        )
