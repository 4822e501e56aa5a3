"""Speeds of a pool's replicas, learned from their answers, and the expected completion of a request.

Replicas of one pool may differ: other hardware, a server that others use as well, or a farther one. Each
completed answer shows the speed of its replica:

    slowness = seconds from dispatch to end / work
    work = prefill tokens + output tokens * step(requests in flight)
    step(n) = _STEP_TOKENS + _STEP_COST_TOKENS * n                 a decode step, in prefill tokens

The median of recent answers counts. While the slowest known replica of a pool needs less than `_UNLIKE_RATIO`
times as long as the fastest, or the ranks of their answers may differ by chance, the replicas are alike, and
the load alone decides. Otherwise the open replica with the lowest of one of two figures is chosen. Own
prefill tokens are those that it does not have cached:

1. The expected completion, if that replica is idle, or if no replica has a part of the prompt cached:

       slowness * (own prefill tokens + output tokens * step(requests in flight + 1)
                   + pending prefill tokens * (1 + requests in flight / _CROWD))

   The earliest completion of each request alone is not the best for all, because fast replicas fill up. So
   pending prefills count more on a replica with many requests, all of which they delay.

2. The cost of like replicas, times the slowness, for other prompts:

       slowness * (own prefill tokens + pending ones) * (requests in flight + 1)

   Output tokens are no part of it. They take most of the time, so they would move all sessions from the
   caches of slow replicas to those of fast ones, which cannot hold them.

Replicas that differ from the fastest by less than `_ALIKE_RATIO` count as fast as it, so that chance does not
give one of them all single requests. One with few answers counts as fast as well, so that its speed is found
out. One that was left idle for `_RETRY_S`, times its slowness relative to the fastest, gets one request,
because it may have become faster.
"""

from collections import deque
from collections.abc import Collection
from statistics import median
from typing import TYPE_CHECKING

from serve_app.core.routing.observed.ranks import rank_deviations

if TYPE_CHECKING:
    from serve_app.core.routing.replica_state import ReplicaState

# A decode step of a small batch, in prefill tokens: 270 by the profile of a 70B model on four H100, 120 for
# an 8B model on an RTX 4090.
_STEP_TOKENS = 200.0
# Cost that one more request in the batch adds to each decode step, in prefill tokens: 3.2 by the profile of
# a 70B model on four H100, 0.8 for an 8B model on an RTX 4090.
_STEP_COST_TOKENS = 2.0
_UNLIKE_RATIO = 1.5
# Beside an unlike replica, those that differ less from the fastest are equals, and take turns.
_ALIKE_RATIO = 1.2
# Standard deviations of the rank sum of their answers beyond which a difference is no chance.
_CLEAR = 1.9
# Requests in flight that double the weight of pending prefills. A lower number spreads more: at half load, an
# answer then ends later, and near saturation its first token comes earlier.
_CROWD = 8.0
# Answers that count, and that make a speed known.
_MAX_ANSWERS, _MIN_ANSWERS = 16, 3
_RETRY_S = 120.0
# Interval of comparisons.
_COMPARE_S = 1.0


def cost(replica: "ReplicaState", prefill_tokens: int) -> int:
    """Return a figure that orders like replicas for a request, which has to compute so many tokens there."""
    return (prefill_tokens + replica.pending_prefill_tokens) * (replica.in_flight + 1)


class ReplicaSpeed:
    """Speed of one replica.

    Attributes:
        ratio: slowness relative to the fastest replica of the pool; 1 if the replicas are alike.
        last_at: time of the last answer.
    """

    __slots__ = ("_answers", "last_at", "ratio")

    def __init__(self) -> None:
        self.ratio = 1.0
        self.last_at = 0.0
        self._answers: deque[float] = deque(maxlen=_MAX_ANSWERS)

    def __repr__(self) -> str:
        return f"<ReplicaSpeed {self.ratio:.2f} answers={len(self._answers)}>"

    def record(self, seconds: float, work: float, now: float) -> None:
        """Learn from a completed answer."""
        self._answers.append(seconds / work)
        self.last_at = now

    @property
    def answers(self) -> Collection[float]:
        """The recent answers, in seconds per prefill token."""
        return self._answers

    @property
    def slowness(self) -> float | None:
        """Seconds per prefill token; None with too few answers."""
        return median(self._answers) if len(self._answers) >= _MIN_ANSWERS else None


class Speeds:
    """Speeds of the replicas of all pools."""

    def __init__(self) -> None:
        self._unlike: set[str] = set()
        self._compared_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Speeds unlike={sorted(self._unlike)}>"

    def are_unlike(self, pool: str) -> bool:
        """Return whether the replicas of a pool differ in speed."""
        return pool in self._unlike

    def work(self, prefill_tokens: int, output_tokens: int, in_flight: int) -> float:
        """Return the work of a request in prefill tokens, beside others in the batch."""
        return prefill_tokens + output_tokens * (_STEP_TOKENS + _STEP_COST_TOKENS * in_flight)

    def completion(
        self, replica: "ReplicaState", prefill_tokens: int, output_tokens: int, now: float
    ) -> float:
        """Return a figure that orders replicas by the expected completion of one more request."""
        pending = replica.pending_prefill_tokens * (1 + replica.in_flight / _CROWD)
        own = self.work(prefill_tokens, output_tokens, replica.in_flight + 1)
        return self._ratio(replica, now) * (own + pending)

    def cost(self, replica: "ReplicaState", prefill_tokens: int, now: float) -> float:
        """Return the cost of like replicas, times the slowness."""
        return self._ratio(replica, now) * cost(replica, prefill_tokens)

    def _ratio(self, replica: "ReplicaState", now: float) -> float:
        speed = replica.speed
        is_retried = not replica.in_flight and now - speed.last_at > _RETRY_S * speed.ratio
        return 1.0 if is_retried else speed.ratio

    def compare(self, pool: str, of_pool: Collection["ReplicaState"], now: float) -> None:
        """Compare the replicas of a pool, at most once per second."""
        if now - self._compared_at.get(pool, -_COMPARE_S) < _COMPARE_S:
            return
        self._compared_at[pool] = now
        known = {each: slowness for each in of_pool if (slowness := each.speed.slowness) is not None}
        fastest = min(known.values(), default=0.0)
        if not fastest or not _is_clear(max(known, key=known.__getitem__), min(known, key=known.__getitem__)):
            self._unlike.discard(pool)
            known = {}
        else:
            self._unlike.add(pool)
        for each in of_pool:
            ratio = known.get(each, fastest) / fastest if fastest else 1.0
            each.speed.ratio = ratio if ratio > _ALIKE_RATIO else 1.0


def _is_clear(slow: "ReplicaState", fast: "ReplicaState") -> bool:
    """Return whether two replicas differ in speed, by more than chance explains."""
    slowness, least = slow.speed.slowness or 0.0, fast.speed.slowness or 0.0
    if slowness < _UNLIKE_RATIO * least:
        return False
    return rank_deviations(slow.speed.answers, fast.speed.answers) > _CLEAR
