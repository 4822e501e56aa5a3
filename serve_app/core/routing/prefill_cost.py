"""Speeds of replicas: the learned time of prefills, rates, and the expected completion of a request.

- `PrefillCosts`: the learned cost of a prefill, C_prefill of EWSJF.
- `DecayingRate`: a rate of events per second with exponential decay, updated in O(1).
- `Speeds`: the speeds of a pool's replicas, learned from their answers, and the expected completion of a
  request.

`PrefillCosts`. `C(b) = base_s + per_token_s * b` for a prompt of `b` tokens is fitted by least squares, with
less weight on older observations. An observation is the time from dispatch to first token of a request whose
prefill had its replica to itself. Requests that share a replica wait for each other, and would count the same
time twice.

Each pool has a separate fit, because pools may run on different hardware if the planner finds that cheaper. A
pool with few observations uses the fit of all pools.

Source: EWSJF, section 4.3, which calls the cost empirical and leaves its form open. A prior counts as a few
observations and decays as real ones arrive.

`Speeds`. Replicas of one pool may differ: other hardware, a server that others use as well, or a farther one.
Each completed answer shows the speed of its replica:

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

import math
from collections import deque
from collections.abc import Collection
from copy import deepcopy
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct, field

from serve_app.core.routing.observed import rank_deviations
from serve_app.core.routing.snapshot import MOST, Amount, Count

if TYPE_CHECKING:
    from serve_app.core.routing.replica_state import ReplicaState


class DecayingRate:
    """Events per second, each weighted by `exp(-age / time_constant_s)`.

    Until the first time constant has passed, the divisor is the time since the start, so that a new rate is
    not underestimated.
    """

    __slots__ = ("_amount", "_at", "_started_at", "_time_constant_s")

    def __init__(self, time_constant_s: float, now: float) -> None:
        self._time_constant_s = time_constant_s
        self._amount = 0.0
        self._at = now
        self._started_at = now

    def add(self, amount: float, now: float) -> None:
        """Add `amount` at `now`."""
        self._decay(now)
        self._amount += amount

    def amount(self, now: float) -> float:
        """Return the sum of what was added, each weighted by its age at `now`."""
        self._decay(now)
        return self._amount

    def per_s(self, now: float) -> float:
        """Return the rate at `now`; 0.0 before the first event."""
        self._decay(now)
        age_s = now - self._started_at
        # The weights of a steady stream add up to time_constant * (1 - exp(-age / time_constant)) seconds.
        window_s = self._time_constant_s * -math.expm1(-age_s / self._time_constant_s)
        return self._amount / max(window_s, _SHORTEST_WINDOW_S)

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._amount *= math.exp((self._at - now) / self._time_constant_s)
            self._at = now

    def __repr__(self) -> str:
        return f"<DecayingRate amount={self._amount:.3f} at={self._at:.3f}>"


# The first event would otherwise be divided by a window close to zero.
_SHORTEST_WINDOW_S = 0.1

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
    return (prefill_tokens + replica.prefills.tokens) * (replica.in_flight + 1)


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
        pending = replica.prefills.tokens * (1 + replica.in_flight / _CROWD)
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


# Weights of points below this share of `sum(weights) * sum(x * x)` are rounding errors.
_LEAST_SPREAD = 1e-9


class DecayingLine(Struct):
    """A line fitted by least squares, with less weight on older points.

    Attributes:
        sums: weighted sums of 1, x, y, x * x and x * y.
    """

    sums: Annotated[list[Amount], Meta(min_length=5, max_length=5)] = field(default_factory=lambda: [0.0] * 5)

    def add(self, x: float, y: float, weight: float = 1.0, *, decay: float = 1.0) -> None:
        """Add a point, after the weights of all earlier ones were multiplied by `decay`."""
        weights, xs, ys, xxs, xys = self.sums
        # Unrolled, because nearly every first token updates it.
        self.sums = [
            weights * decay + weight,
            xs * decay + weight * x,
            ys * decay + weight * y,
            xxs * decay + weight * x * x,
            xys * decay + weight * x * y,
        ]

    def slope(self) -> float | None:
        """Return the slope, or None while all points have about the same x."""
        weight, x, y, xx, xy = self.sums
        spread = weight * xx - x * x
        return (weight * xy - x * y) / spread if spread > _LEAST_SPREAD * weight * xx else None


# The prior is between an 8B model on a large GPU and a 70B model on four. Only the ratio of the two numbers
# affects the order.
_PRIOR_BASE_S, _PRIOR_PER_TOKEN_S = 0.03, 1e-4
# Weight of the prior, in observations.
_PRIOR_WEIGHT = 4.0
# Prefills after which a pool's own fit outweighs its prior.
_LEARNED = 8
# Factor on the weight of earlier observations at each new one: about the last 200 count.
_DECAY = 0.995


class PrefillCost(DecayingLine, kw_only=True):
    """One fit of seconds over prompt tokens, of a pool or of all pools of a model."""

    base_s: Annotated[float, Meta(gt=0, le=MOST)]
    per_token_s: Amount
    observations: Count

    def __post_init__(self) -> None:
        if self.sums[0] <= 0:
            raise ValueError(f"prefill costs need observations, got {self.sums}")

    @classmethod
    def prior(cls) -> "PrefillCost":
        """Return the fit before the first observation."""
        line = DecayingLine()
        for tokens in (64.0, 4096.0):
            line.add(tokens, _PRIOR_BASE_S + _PRIOR_PER_TOKEN_S * tokens, _PRIOR_WEIGHT)
        return cls(line.sums, base_s=_PRIOR_BASE_S, per_token_s=_PRIOR_PER_TOKEN_S, observations=0)

    def seconds(self, tokens: float) -> float:
        """Return C_prefill of a prompt of `tokens`; always positive."""
        return self.base_s + self.per_token_s * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one prefill that had its replica to itself. Impossible values are ignored."""
        if tokens < 1 or seconds <= 0:
            return
        self.observations += 1
        self.add(float(tokens), seconds, decay=_DECAY)
        if (slope := self.slope()) is not None:
            # More tokens never cost less, and no prompt is free; noise may suggest otherwise for a while.
            self.per_token_s = max(slope, 1e-9)
        weight, x, y, _, _ = self.sums
        self.base_s = max((y - self.per_token_s * x) / weight, 1e-4)

    def __repr__(self) -> str:
        return (
            f"<PrefillCost {self.base_s:.4f} s + {self.per_token_s * 1e3:.4f} ms/token n={self.observations}>"
        )


class PrefillCostsState(Struct, kw_only=True):
    """Everything that `PrefillCosts` has learned."""

    version: Literal[2]
    shared: PrefillCost
    pools: dict[str, PrefillCost]


class PrefillCosts:
    """The fits of a model's pools."""

    def __init__(self) -> None:
        self._by_pool: dict[str, PrefillCost] = {}
        self.shared = PrefillCost.prior()

    def of(self, pool: str) -> PrefillCost:
        """Return the pool's own fit, or the shared one if the pool has few observations."""
        own = self._by_pool.get(pool)
        return self.shared if own is None or own.observations < _LEARNED else own

    def observe(self, pool: str, tokens: int, seconds: float) -> None:
        """Learn from one prefill that had its replica to itself. Impossible values are ignored."""
        if pool not in self._by_pool:
            self._by_pool[pool] = PrefillCost.prior()
        for cost in (self._by_pool[pool], self.shared):
            cost.observe(tokens, seconds)

    def state(self) -> PrefillCostsState:
        """Return everything learned (see `snapshot`)."""
        return deepcopy(PrefillCostsState(version=2, shared=self.shared, pools=self._by_pool))

    def restore(self, state: PrefillCostsState) -> None:
        """Restore a result of `state` (see `snapshot`). It decays like any observation."""
        self.shared, self._by_pool = state.shared, state.pools

    def __repr__(self) -> str:
        pools = " ".join(f"{pool}={cost}" for pool, cost in self._by_pool.items())
        return f"<PrefillCosts shared={self.shared} {pools}".rstrip() + ">"
