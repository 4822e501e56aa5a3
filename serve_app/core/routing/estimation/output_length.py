"""Output lengths: estimates of answers if the client set no limit or one far above its use.

Two numbers are learned from completed requests. A high quantile replaces a missing `max_tokens` in the token
budget, and the expected length is the charge on the KV cache. `LengthCurve` is the estimator.

There are curves per tenant and category, and per category. The most specific one with enough answers is used,
and constants before that.
"""

import bisect
import itertools
import math
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from serve_app.core.routing.snapshot import MOST, Amount, Count
from serve_app.request import Request, TextCategory, Usage

# Quantile of the lengths that replaces a missing max_tokens. It is high, because an engine silently cuts off
# an answer in a pool that is too short for it. For ordinary chat even the 99th percentile is far below a
# context window.
QUANTILE = 0.99
# The same before anything is learned (LMSYS-Chat-1M: p99 502).
_DEFAULT_MAX_TOKENS = 1024
# Mean length of an answer before anything is learned (LMSYS-Chat-1M: 177).
_DEFAULT_MEAN_TOKENS = 256
# Share of that mean for predictions that must not reject what could be served.
_ASSUMED_SHARE = 0.4
# A larger max_tokens is ignored: frameworks send the context window, or a million.
_MAX_PLAUSIBLE_TOKENS = 65_536
# Answers that must have ended before their limit for learned lengths to be used. At 50, the 99th percentile
# is about the longest of them.
_MIN_OBSERVATIONS = 50
# Answers after which the weight of an old one has fallen to 37 %.
_HISTORY_OBSERVATIONS = 1000
# Maximum number of curves per tenant and category, about 5 kB each. The least recently used one is dropped
# first.
_MAX_TENANTS = 1000


# The length curve: the distribution of one kind of answer's length, corrected for answers that were cut off.
#
# An answer that reached its `max_tokens` shows only that it would have been *at least* that long. Ignoring
# such answers, or using their lengths directly, would both bias the lengths down. So this is the
# product-limit estimate of survival analysis (Kaplan and Meier 1958), on a histogram of quarter octaves:
#
#     S(t) = product over the buckets up to t of  1 - ended / at_risk       P(answer longer than t)
#     quantile q: the first t with S(t) <= 1 - q
#     expected length under a limit M: the integral of S from 0 to M
#
# If all answers of a benchmark run to their limit, S remains 1 and the expected length is the limit. If chats
# with `max_tokens: 4096` end after 200 tokens, the expected length is 200. Old observations decay.


_PER_OCTAVE = 4
_BUCKETS = 20 * _PER_OCTAVE  # up to 2^20 tokens
_EDGES = [2 ** (index / _PER_OCTAVE) for index in range(1, _BUCKETS + 1)]
_WIDTHS = [upper - lower for lower, upper in itertools.pairwise([0.0, *_EDGES])]
# Probabilities at which a distribution is represented by equally likely lengths.
_POINTS = (0.125, 0.375, 0.625, 0.875)
# Below this probability an answer counts as longer than all before it.
_FEWEST = 1e-3
# Factor on the age of an answer that is longer than any before it: lengths have heavy tails.
_LONGER = 1.5
_REFRESH_EVERY = 32  # observations; a curve costs about 10 us to compute
_MAX_SCALE = 1e12  # before new observations exceed what a float can add up


# Weights of the buckets that are not empty.
_Weights = dict[Annotated[int, Meta(ge=0, lt=_BUCKETS)], Amount]


class CurveState(Struct, kw_only=True):
    """Everything that a `LengthCurve` has learned."""

    seen: Count
    scale: Annotated[float, Meta(ge=1, le=MOST)]
    ended: _Weights
    cut: _Weights


class LengthCurve:
    """The learned distribution of one kind of answer's length.

    Attributes:
        ended: answers that ended before their limit, without decay.
        observed: all answers, without decay.
    """

    def __init__(self) -> None:
        self._ended = [0.0] * _BUCKETS
        self._cut = [0.0] * _BUCKETS
        self._scale = 1.0  # weight of the next observation; growing it fades all older ones at once
        self.ended = self.observed = 0
        self._fresh_for = 0
        self._quantile = 1
        self._survival = [1.0] * _BUCKETS
        self._integral = [0.0] * _BUCKETS
        # Probability of an end up to each bucket's upper edge: ascending, for binary search.
        self._deaths = [0.0] * _BUCKETS

    @property
    def is_learned(self) -> bool:
        """True if enough answers have been observed to use the curve."""
        return self.observed >= _MIN_OBSERVATIONS

    def observe(self, bucket: int, *, was_cut: bool) -> None:
        """Learn that an answer ended in a bucket of lengths (`bucket_of`), or was cut off there."""
        if was_cut:
            self._cut[bucket] += self._scale
        else:
            self._ended[bucket] += self._scale
            self.ended += 1
        self.observed += 1
        self._fresh_for -= 1
        self._scale *= 1 + 1 / _HISTORY_OBSERVATIONS
        if self._scale > _MAX_SCALE:
            self._rescale()

    def quantile(self) -> int:
        """Return the `QUANTILE` of the length, rounded up to a bucket's edge."""
        self._refresh()
        return self._quantile

    def expected(self, limit: float) -> float:
        """Return the mean length of an answer that is cut off at `limit` tokens."""
        self._refresh()
        index = bucket_of(limit)
        lower = _EDGES[index - 1] if index else 0.0
        before = self._integral[index - 1] if index else 0.0
        return before + self._survival[index] * max(0.0, limit - lower)

    def ends(self, age: float, limit: float) -> tuple[float, ...]:
        """Return equally likely lengths of an answer that has `age` tokens, cut off at `limit`."""
        self._refresh()
        before = 1.0 - self._ended_by(age)
        if before <= _FEWEST:
            # No answer was this long.
            return (min(limit, _LONGER * max(1.0, age)),)
        # Answers that were all cut off show no end: they count up to the quantile.
        beyond = max(float(self._quantile), _LONGER * age)
        ends = (self._length_at(1.0 - before * (1.0 - share), beyond) for share in _POINTS)
        return tuple(min(limit, end) for end in ends)

    def _ended_by(self, tokens: float) -> float:
        """Return the probability that an answer ends within this length, interpolated within its bucket."""
        if tokens <= 0:
            return 0.0
        index = bucket_of(tokens)
        lower = _EDGES[index - 1] if index else 0.0
        before = self._deaths[index - 1] if index else 0.0
        return before + (self._deaths[index] - before) * min(1.0, (tokens - lower) / _WIDTHS[index])

    def _length_at(self, probability: float, beyond: float) -> float:
        """Return the length within which answers end with this probability; `beyond` if that is unknown."""
        index = bisect.bisect_left(self._deaths, probability)
        if index == _BUCKETS:
            return beyond
        before = self._deaths[index - 1] if index else 0.0
        lower = _EDGES[index - 1] if index else 0.0
        return lower + _WIDTHS[index] * (probability - before) / (self._deaths[index] - before)

    def _refresh(self) -> None:
        if self._fresh_for > 0:
            return
        self._fresh_for = _REFRESH_EVERY
        self._compute()

    def _compute(self) -> None:
        at_risk = sum(self._ended) + sum(self._cut)
        survival, area, quantile = 1.0, 0.0, 0.0
        least = 1 - QUANTILE
        survivals: list[float] = []
        deaths: list[float] = []
        integral: list[float] = []
        for ended, cut, upper, width in zip(self._ended, self._cut, _EDGES, _WIDTHS, strict=True):
            middle = survival
            if ended:
                before = survival
                survival *= 1 - ended / max(at_risk, ended)  # rounding
                # Within a bucket answers end at its middle, on average.
                middle = (before + survival) / 2
            at_risk -= ended + cut
            area += middle * width
            survivals.append(middle)
            deaths.append(1.0 - survival)
            integral.append(area)
            if not quantile and survival <= least:
                quantile = upper
        self._survival, self._integral, self._deaths = survivals, integral, deaths
        self._quantile = self._bound(quantile)

    def _bound(self, quantile: float) -> int:
        """Return the quantile. If too many answers were cut off, the longest so far or a longer default."""
        if not quantile or self.ended < _MIN_OBSERVATIONS:
            longest = max((i for i in range(_BUCKETS) if self._ended[i] or self._cut[i]), default=0)
            quantile = max(_EDGES[longest], _DEFAULT_MAX_TOKENS)
        return max(1, min(math.ceil(quantile), _MAX_PLAUSIBLE_TOKENS))

    def _rescale(self) -> None:
        self._ended = [weight / self._scale for weight in self._ended]
        self._cut = [weight / self._scale for weight in self._cut]
        self._scale = 1.0

    def state(self) -> CurveState:
        """Return everything learned (see `snapshot`)."""
        return CurveState(
            seen=self.ended,
            scale=self._scale,
            ended={index: weight for index, weight in enumerate(self._ended) if weight},
            cut={index: weight for index, weight in enumerate(self._cut) if weight},
        )

    @classmethod
    def restored(cls, state: CurveState) -> "LengthCurve":
        """Restore a result of `state` (see `snapshot`)."""
        curve = cls()
        curve.ended, curve._scale = state.seen, state.scale
        curve._ended = [state.ended.get(index, 0.0) for index in range(_BUCKETS)]
        curve._cut = [state.cut.get(index, 0.0) for index in range(_BUCKETS)]
        curve.observed = state.seen + round(sum(curve._cut) / state.scale)
        return curve


def bucket_of(tokens: float) -> int:
    """Return the bucket of a length."""
    if tokens <= 1:
        return 0
    return min(_BUCKETS - 1, max(0, math.ceil(_PER_OCTAVE * math.log2(tokens)) - 1))


class OutputEstimate(NamedTuple):
    """The length of one choice, in tokens.

    Attributes:
        limit: its maximum: the client's limit if it is plausible, else the quantile.
        expected: mean of an answer that is cut off there.
        least: a lower estimate of the mean; the same if lengths have been learned.
        curve: the learned distribution; None before enough answers have been observed.
        longest: the client's limit; infinite without a plausible one.
        generated: tokens of the answer that became a part of the prompt, and do not count here.
    """

    limit: int
    expected: float
    least: float
    curve: LengthCurve | None = None
    longest: float = math.inf
    generated: int = 0

    def after(self, generated: int) -> "OutputEstimate":
        """Return the estimate of the rest of an answer that has `generated` tokens."""
        ends = self.ends(generated)
        rest = max(1.0, sum(ends) / len(ends) - generated)
        return self._replace(
            limit=max(1, self.limit - generated),
            expected=rest,
            least=rest,
            longest=max(1.0, self.longest - generated),
            generated=self.generated + generated,
        )

    def ends(self, age: float) -> tuple[float, ...]:
        """Return equally likely lengths of an answer that has `age` tokens."""
        longest = self.longest
        if self.generated and self.curve is not None:
            whole = self.curve.ends(age + self.generated, longest + self.generated)
            return tuple(end - self.generated for end in whole)
        if self.curve is not None:
            return self.curve.ends(age, longest)
        return tuple(min(longest, age - _DEFAULT_MEAN_TOKENS * math.log1p(-share)) for share in _POINTS)


class TenantCurve(Struct):
    """State of the curve of a tenant's answers of one category."""

    tenant: str
    category: TextCategory
    curve: CurveState


class OutputState(Struct):
    """Everything that an `OutputLengthEstimator` has learned; the tenants by their last use."""

    categories: dict[TextCategory, CurveState]
    tenants: list[TenantCurve]


class OutputLengthEstimator:
    """Estimates the output lengths of one model, by tenant and category."""

    def __init__(self) -> None:
        self._categories: dict[TextCategory, LengthCurve] = {}
        # In order of last use, the oldest first, so that dropping one is O(1).
        self._tenants: dict[tuple[str, TextCategory], LengthCurve] = {}

    def __repr__(self) -> str:
        return f"<OutputLengthEstimator of {len(self._tenants)} tenants, {len(self._categories)} categories>"

    def estimate(self, request: Request) -> OutputEstimate:
        """Return the estimated length of one choice."""
        curve, limit = self._curve(request), self._plausible_limit(request)
        longest = math.inf if limit is None else float(limit)
        if curve is None:
            limit = _DEFAULT_MAX_TOKENS if limit is None else limit
            mean = _DEFAULT_MEAN_TOKENS  # of an exponential distribution, cut at the limit
            expected = 0.0 if limit <= 0 else -mean * math.expm1(-limit / mean)
            return OutputEstimate(limit, expected, min(expected, _ASSUMED_SHARE * mean), longest=longest)
        limit = curve.quantile() if limit is None else limit
        expected = 0.0 if limit <= 0 else min(float(limit), curve.expected(limit))
        return OutputEstimate(limit, expected, expected, curve, longest)

    def observe(self, request: Request, usage: Usage) -> None:
        """Learn from one completed request. Its choices count as one answer of mean length."""
        stated = self._plausible_limit(request)
        if usage.output_tokens <= 0 or stated == 0:
            return
        tokens = usage.output_tokens / max(1, request.spec.choices)
        was_cut = stated is not None and tokens >= stated
        category = request.shape.category
        of_all = self._categories.get(category)
        if of_all is None:
            of_all = self._categories[category] = LengthCurve()
        key = (request.tenant, category)
        curve = self._tenants.pop(key, None) or LengthCurve()
        bucket = bucket_of(tokens)
        of_all.observe(bucket, was_cut=was_cut)
        curve.observe(bucket, was_cut=was_cut)
        self._tenants[key] = curve
        if len(self._tenants) > _MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]

    def _plausible_limit(self, request: Request) -> int | None:
        stated = request.spec.max_output_tokens
        if stated is None or stated > _MAX_PLAUSIBLE_TOKENS:
            return None
        return max(0, stated)

    def _curve(self, request: Request) -> LengthCurve | None:
        category = request.shape.category
        curve = self._tenants.get((request.tenant, category))
        if curve is None or not curve.is_learned:
            curve = self._categories.get(category)
        return curve if curve is not None and curve.is_learned else None

    def state(self) -> OutputState:
        """Return everything learned (see `snapshot`)."""
        return OutputState(
            {category: curve.state() for category, curve in self._categories.items()},
            [TenantCurve(*key, curve.state()) for key, curve in self._tenants.items()],
        )

    def restore(self, state: OutputState) -> None:
        """Restore a result of `state` (see `snapshot`)."""
        restored = LengthCurve.restored
        self._categories = {category: restored(curve) for category, curve in state.categories.items()}
        self._tenants = {(each.tenant, each.category): restored(each.curve) for each in state.tenants}
