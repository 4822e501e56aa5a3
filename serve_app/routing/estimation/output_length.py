"""How long will the answer be, when the client gave no limit, or a limit far above what it will use?

Two numbers are learned from finished requests: a high quantile, which stands in for a missing `max_tokens`
in the token budget, and the expected length, which is what the KV cache is charged with.

A request that ran into its `max_tokens` shows only that its answer would have been *at least* so long.
Dropping such requests, or taking them at face value, would both teach lengths that are too short. So this
is the product-limit estimate of survival analysis (Kaplan and Meier 1958), on a histogram of quarter octaves:

    S(t) = product over the buckets up to t of  1 - ended / at_risk       P(answer longer than t)
    quantile q: the first t with S(t) <= 1 - q          expected length under a limit M: the integral of S
    from 0 to M

If all requests of a benchmark run to their limit then S stays at 1 and the expected length is the limit; if
chats with `max_tokens: 4096` end after 200 tokens then 200 is expected of the next one. Old observations
fade.

Evidence is kept per tenant and category, and per category; the most specific that has seen enough answers
speaks, and before any has, the settings' own numbers do.
"""

import math
from typing import Annotated

from serve_app.request import Request, TextCategory, Usage
from serve_app.routing.snapshot import Snapshot, number, section, sections, text
from serve_app.settings_base import INNER_SHARE, at_least, settings

_PER_OCTAVE = 4
_BUCKETS = 20 * _PER_OCTAVE  # up to 2^20 tokens
_EDGES = [2 ** (index / _PER_OCTAVE) for index in range(1, _BUCKETS + 1)]
_REFRESH_EVERY = 32  # observations; the curve costs about 10 us to draw
_LARGEST_SCALE = 1e12  # before new observations outgrow what a float can add up


@settings(block="estimator.output")
class OutputSettings:
    """How output lengths are assumed, learned and bounded, in tokens."""

    # Which quantile stands in for a missing max_tokens. In a pool that is too short for the answer the
    # engine cuts it off unseen, so this is high; for ordinary chat even the 99th percentile is short
    # beside a context window.
    quantile: Annotated[float, INNER_SHARE.hint("0.99 is usual")] = 0.99
    # The stand-in, and the mean, before anything is learned (LMSYS-Chat-1M: p99 502, mean 177).
    default_max_tokens: Annotated[int, at_least(1)] = 1024
    default_mean_tokens: Annotated[int, at_least(1)] = 256
    # A larger max_tokens is taken for "no limit": frameworks send the context window, or a million.
    largest_believed_max_tokens: Annotated[int, at_least(1)] = 65_536
    # Answers that must have ended by themselves before the learned numbers speak. At 50, the 99th
    # percentile is about the longest seen.
    min_observations: Annotated[int, at_least(1)] = 50
    # After so many answers the weight of an old one has fallen to 37 %.
    memory_observations: Annotated[int, at_least(1)] = 1000
    # Tenants (times categories) remembered by name; about 5 kB each. The least recently seen is forgotten
    # first.
    max_tenants: Annotated[int, at_least(1)] = 1000


class LengthCurve:
    """The learned distribution of one kind of answer's length.

    Attributes:
        ended: answers seen that ended by themselves, without fading.
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
        """Has it seen enough to speak?"""
        return self.ended >= self._settings.min_observations

    def observe(self, tokens: float, *, was_cut: bool) -> None:
        """Learn that an answer ended after `tokens`, or was cut off there."""
        index = _bucket(tokens)
        if was_cut:
            self._cut[index] += self._scale
        else:
            self._ended[index] += self._scale
            self.ended += 1
        self._fresh_for -= 1
        self._scale *= 1 + 1 / self._settings.memory_observations
        if self._scale > _LARGEST_SCALE:
            self._rescale()

    def quantile(self) -> int:
        """The length that the settings' share of answers stays within, rounded up to a bucket's edge."""
        self._refresh()
        return self._quantile

    def expected(self, limit: float) -> float:
        """Mean length of an answer that is cut off at `limit` tokens."""
        self._refresh()
        index = _bucket(limit)
        lower = _EDGES[index - 1] if index else 0.0
        before = self._integral[index - 1] if index else 0.0
        return before + self._survival[index] * max(0.0, limit - lower)

    def _refresh(self) -> None:
        if self._fresh_for > 0:
            return
        self._fresh_for = _REFRESH_EVERY
        self._draw_curve()

    def _draw_curve(self) -> None:
        at_risk = sum(self._ended) + sum(self._cut)
        survival, area, lower = 1.0, 0.0, 0.0
        quantile = 0.0
        for index, upper in enumerate(_EDGES):
            ended, before = self._ended[index], survival
            if ended:
                survival *= 1 - ended / max(at_risk, ended)  # rounding may leave less at risk than ends
            at_risk -= ended + self._cut[index]
            # Inside a bucket the answers end at its middle, on average.
            self._survival[index] = (before + survival) / 2
            area += self._survival[index] * (upper - lower)
            self._integral[index] = area
            lower = upper
            if not quantile and survival <= 1 - self._settings.quantile:
                quantile = upper
        self._quantile = self._bound(quantile)

    def _bound(self, quantile: float) -> int:
        """Where too many answers were cut off to see the quantile, the longest seen, or a longer default."""
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
        """Everything learned, for `restore`; empty buckets are left out."""
        return {
            "seen": self.ended,
            "scale": self._scale,
            "ended": {str(index): weight for index, weight in enumerate(self._ended) if weight},
            "cut": {str(index): weight for index, weight in enumerate(self._cut) if weight},
        }

    def restore(self, state: Snapshot) -> None:
        """Take over what `state` returned.

        Raises:
            ValueError: a value is missing or out of range; nothing is taken over then.
        """
        seen, scale = int(number(state, "seen", at_least=0)), number(state, "scale", at_least=1)
        ended, cut = _weights(section(state, "ended")), _weights(section(state, "cut"))
        self.ended, self._scale, self._ended, self._cut = seen, scale, ended, cut
        self._fresh_for = 0


class OutputLengthEstimator:
    """The output lengths of one model, by tenant and category."""

    def __init__(self, settings: OutputSettings) -> None:
        self._settings = settings
        self._categories: dict[TextCategory, LengthCurve] = {}
        # In order of last sight, the oldest first, so that forgetting one is O(1).
        self._tenants: dict[tuple[str, TextCategory], LengthCurve] = {}

    def __repr__(self) -> str:
        return f"<OutputLengthEstimator of {len(self._tenants)} tenants, {len(self._categories)} categories>"

    def limit(self, request: Request) -> int:
        """The most tokens one choice may have: the client's own limit if believable, or else the quantile."""
        stated = self._believed(request)
        if stated is not None:
            return stated
        curve = self._curve(request)
        return curve.quantile() if curve else self._settings.default_max_tokens

    def expected(self, request: Request, limit: int) -> float:
        """Mean length of one choice that is cut off at `limit`."""
        if limit <= 0:
            return 0.0
        curve = self._curve(request)
        if curve:
            return min(float(limit), curve.expected(limit))
        mean = self._settings.default_mean_tokens  # of an exponential distribution, cut at the limit
        return -mean * math.expm1(-limit / mean)

    def observe(self, request: Request, usage: Usage) -> None:
        """Learn from one finished request; its choices count as one answer of mean length."""
        stated = self._believed(request)
        if usage.output_tokens <= 0 or stated == 0:
            return
        tokens = usage.output_tokens / max(1, request.spec.choices)
        was_cut = stated is not None and tokens >= stated
        category = request.shape.category
        self._categories.setdefault(category, LengthCurve(self._settings)).observe(tokens, was_cut=was_cut)
        key = (request.tenant, category)
        curve = self._tenants.pop(key, None) or LengthCurve(self._settings)
        curve.observe(tokens, was_cut=was_cut)
        self._tenants[key] = curve
        if len(self._tenants) > self._settings.max_tenants:
            del self._tenants[next(iter(self._tenants))]

    def _believed(self, request: Request) -> int | None:
        stated = request.spec.max_output_tokens
        if stated is None or stated > self._settings.largest_believed_max_tokens:
            return None
        return max(0, stated)

    def _curve(self, request: Request) -> LengthCurve | None:
        category = request.shape.category
        for curve in (self._tenants.get((request.tenant, category)), self._categories.get(category)):
            if curve is not None and curve.is_learned:
                return curve
        return None

    def state(self) -> dict[str, object]:
        """Everything learned, for `restore`."""
        return {
            "categories": {category.value: curve.state() for category, curve in self._categories.items()},
            "tenants": [
                {"tenant": tenant, "category": category.value, "curve": curve.state()}
                for (tenant, category), curve in self._tenants.items()
            ],
        }

    def restore(self, state: Snapshot) -> None:
        """Take over what `state` returned.

        Raises:
            ValueError: a part is missing or malformed; nothing is taken over then.
        """
        by_category = section(state, "categories")
        categories = {TextCategory(name): self._restored(section(by_category, name)) for name in by_category}
        tenants = {}
        for entry in sections(state, "tenants"):
            key = (text(entry, "tenant"), TextCategory(text(entry, "category")))
            tenants[key] = self._restored(section(entry, "curve"))
        self._categories, self._tenants = categories, tenants

    def _restored(self, state: Snapshot) -> LengthCurve:
        curve = LengthCurve(self._settings)
        curve.restore(state)
        return curve


def _bucket(tokens: float) -> int:
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
