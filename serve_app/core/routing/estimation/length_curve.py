"""The length curve: the distribution of one kind of answer's length, with cut-off answers taken into account.

An answer that reached its `max_tokens` shows only that it would have been *at least* so long. Ignoring such
answers, or taking their lengths at face value, would both teach lengths that are too short. So this is the
product-limit estimate of survival analysis (Kaplan and Meier 1958), on a histogram of quarter octaves:

    S(t) = product over the buckets up to t of  1 - ended / at_risk       P(answer longer than t)
    quantile q: the first t with S(t) <= 1 - q
    expected length under a limit M: the integral of S from 0 to M

If all answers of a benchmark run to their limit, S stays at 1 and the expected length is the limit. If chats
with `max_tokens: 4096` end after 200 tokens, 200 is expected of the next. Old observations fade.
"""

import itertools
import math
from typing import Annotated

from serve_app.core.routing.snapshot import Snapshot, number, section
from serve_app.core.settings_base import INNER_SHARE, at_least, settings

_PER_OCTAVE = 4
_BUCKETS = 20 * _PER_OCTAVE  # up to 2^20 tokens
_EDGES = [2 ** (index / _PER_OCTAVE) for index in range(1, _BUCKETS + 1)]
_WIDTHS = [upper - lower for lower, upper in itertools.pairwise([0.0, *_EDGES])]
_REFRESH_EVERY = 32  # observations; a curve costs about 10 us to compute
_LARGEST_SCALE = 1e12  # before new observations exceed what a float can add up


@settings(block="estimator.output")
class OutputSettings:
    """How output lengths are assumed, learned and bounded, in tokens."""

    # Quantile of the lengths that replaces a missing max_tokens. In a pool that is too short for the answer
    # the engine cuts it off silently, so this is high. For ordinary chat even the 99th percentile is far
    # below a context window.
    quantile: Annotated[float, INNER_SHARE.hint("0.99 is usual")] = 0.99
    # That replacement, before anything is learned (LMSYS-Chat-1M: p99 502).
    default_max_tokens: Annotated[int, at_least(1)] = 1024
    # A larger max_tokens counts as none: frameworks send the context window, or a million.
    largest_believed_max_tokens: Annotated[int, at_least(1)] = 65_536
    # Answers that must have ended by themselves before the learned lengths are used. At 50, the 99th
    # percentile is about the longest of them.
    min_observations: Annotated[int, at_least(1)] = 50
    # Answers after which the weight of an old one has fallen to 37 %.
    memory_observations: Annotated[int, at_least(1)] = 1000
    # Pairs of tenant and category with a curve of their own, about 5 kB each. The least recently used is
    # dropped first.
    max_tenants: Annotated[int, at_least(1)] = 1000


class LengthCurve:
    """The learned distribution of one kind of answer's length.

    Attributes:
        ended: answers so far that ended by themselves; it does not fade.
    """

    __slots__ = (
        "_cut",
        "_ended",
        "_fresh_for",
        "_integral",
        "_quantile",
        "_scale",
        "_settings",
        "_survival",
        "ended",
    )

    def __init__(self, settings: OutputSettings) -> None:
        self._settings = settings
        self._ended = [0.0] * _BUCKETS
        self._cut = [0.0] * _BUCKETS
        self._scale = 1.0  # weight of the next observation; growing it fades all older ones at once
        self.ended = 0
        self._fresh_for = 0
        self._quantile = 1
        self._survival = [1.0] * _BUCKETS
        self._integral = [0.0] * _BUCKETS

    @property
    def is_learned(self) -> bool:
        """Whether enough answers have ended to use it."""
        return self.ended >= self._settings.min_observations

    def observe(self, bucket: int, *, was_cut: bool) -> None:
        """Learn that an answer ended after so many tokens (`bucket_of`), or was cut off there."""
        if was_cut:
            self._cut[bucket] += self._scale
        else:
            self._ended[bucket] += self._scale
            self.ended += 1
        self._fresh_for -= 1
        self._scale *= 1 + 1 / self._settings.memory_observations
        if self._scale > _LARGEST_SCALE:
            self._rescale()

    def quantile(self) -> int:
        """The configured quantile of the length, rounded up to a bucket's edge."""
        self._refresh()
        return self._quantile

    def expected(self, limit: float) -> float:
        """Mean length of an answer that is cut off at `limit` tokens."""
        self._refresh()
        index = bucket_of(limit)
        lower = _EDGES[index - 1] if index else 0.0
        before = self._integral[index - 1] if index else 0.0
        return before + self._survival[index] * max(0.0, limit - lower)

    def _refresh(self) -> None:
        if self._fresh_for > 0:
            return
        self._fresh_for = _REFRESH_EVERY
        self._compute()

    def _compute(self) -> None:
        at_risk = sum(self._ended) + sum(self._cut)
        survival, area, quantile = 1.0, 0.0, 0.0
        least = 1 - self._settings.quantile
        survivals: list[float] = []
        integral: list[float] = []
        for ended, cut, upper, width in zip(self._ended, self._cut, _EDGES, _WIDTHS, strict=True):
            middle = survival
            if ended:
                before = survival
                survival *= 1 - ended / max(at_risk, ended)  # rounding
                # Inside a bucket answers end at its middle, on average.
                middle = (before + survival) / 2
            at_risk -= ended + cut
            area += middle * width
            survivals.append(middle)
            integral.append(area)
            if not quantile and survival <= least:
                quantile = upper
        self._survival, self._integral = survivals, integral
        self._quantile = self._bound(quantile)

    def _bound(self, quantile: float) -> int:
        """The quantile; where too many answers were cut off, the longest so far or a longer default."""
        settings = self._settings
        if not quantile:
            longest = max((i for i in range(_BUCKETS) if self._ended[i] or self._cut[i]), default=0)
            quantile = max(_EDGES[longest], settings.default_max_tokens)
        return max(1, min(math.ceil(quantile), settings.largest_believed_max_tokens))

    def _rescale(self) -> None:
        self._ended = [weight / self._scale for weight in self._ended]
        self._cut = [weight / self._scale for weight in self._cut]
        self._scale = 1.0

    def state(self) -> dict[str, object]:
        """Everything learned (see `snapshot`), without empty buckets."""
        return {
            "seen": self.ended,
            "scale": self._scale,
            "ended": {str(index): weight for index, weight in enumerate(self._ended) if weight},
            "cut": {str(index): weight for index, weight in enumerate(self._cut) if weight},
        }

    def restore(self, state: Snapshot) -> None:
        """Restore what `state` returned (see `snapshot`)."""
        seen, scale = int(number(state, "seen", at_least=0)), number(state, "scale", at_least=1)
        ended, cut = _weights(section(state, "ended")), _weights(section(state, "cut"))
        self.ended, self._scale, self._ended, self._cut = seen, scale, ended, cut
        self._fresh_for = 0


def bucket_of(tokens: float) -> int:
    """The bucket of a length."""
    if tokens <= 1:
        return 0
    return min(_BUCKETS - 1, max(0, math.ceil(_PER_OCTAVE * math.log2(tokens)) - 1))


def _weights(state: Snapshot) -> list[float]:
    weights = [0.0] * _BUCKETS
    for name in state:
        if not (name.isdecimal() and int(name) < _BUCKETS):
            raise ValueError(
                f"learned state: {name!r} is no bucket of output lengths; delete it to learn anew"
            )
        weights[int(name)] = number(state, name, at_least=0)
    return weights
