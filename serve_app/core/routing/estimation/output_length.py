"""Output lengths: how long an answer will be, when the client gave no limit or one far above its use.

Two numbers are learned from finished requests. A high quantile replaces a missing `max_tokens` in the token
budget, and the expected length is what the KV cache is charged with. `length_curve` has the estimator.

Curves are kept per tenant and category, and per category. The most specific one with enough answers is used,
and before that the defaults of the settings.
"""

import math
from typing import NamedTuple

from serve_app.core.routing.estimation.length_curve import LengthCurve, OutputSettings, bucket_of
from serve_app.core.routing.snapshot import Snapshot, section, sections, text
from serve_app.request import Request, TextCategory, Usage

# Of the assumed mean length, for predictions that must not refuse what could be served.
_ASSUMED_SHARE = 0.4
# Mean length of an answer before anything is learned (LMSYS-Chat-1M: 177).
_DEFAULT_MEAN_TOKENS = 256


class OutputEstimate(NamedTuple):
    """The length of one choice, in tokens.

    Attributes:
        limit: the most: the client's limit if it is believed, or else the quantile.
        expected: the mean of an answer that is cut off there.
        least: a lower estimate of that; the same where lengths have been learned.
    """

    limit: int
    expected: float
    least: float


class OutputLengthEstimator:
    """The output lengths of one model, by tenant and category."""

    def __init__(self, settings: OutputSettings) -> None:
        self._settings = settings
        self._categories: dict[TextCategory, LengthCurve] = {}
        # In order of last use, the oldest first, so that dropping one is O(1).
        self._tenants: dict[tuple[str, TextCategory], LengthCurve] = {}

    def __repr__(self) -> str:
        return f"<OutputLengthEstimator of {len(self._tenants)} tenants, {len(self._categories)} categories>"

    def estimate(self, request: Request) -> OutputEstimate:
        """How long one choice will be."""
        settings, curve, limit = self._settings, self._curve(request), self._believed(request)
        if curve is None:
            limit = settings.default_max_tokens if limit is None else limit
            mean = _DEFAULT_MEAN_TOKENS  # of an exponential distribution, cut at the limit
            expected = 0.0 if limit <= 0 else -mean * math.expm1(-limit / mean)
            return OutputEstimate(limit, expected, min(expected, _ASSUMED_SHARE * mean))
        limit = curve.quantile() if limit is None else limit
        expected = 0.0 if limit <= 0 else min(float(limit), curve.expected(limit))
        return OutputEstimate(limit, expected, expected)

    def observe(self, request: Request, usage: Usage) -> None:
        """Learn from one finished request; its choices count as one answer of mean length."""
        stated = self._believed(request)
        if usage.output_tokens <= 0 or stated == 0:
            return
        tokens = usage.output_tokens / max(1, request.spec.choices)
        was_cut = stated is not None and tokens >= stated
        category = request.shape.category
        of_all = self._categories.get(category)
        if of_all is None:
            of_all = self._categories[category] = LengthCurve(self._settings)
        key = (request.tenant, category)
        curve = self._tenants.pop(key, None) or LengthCurve(self._settings)
        bucket = bucket_of(tokens)
        of_all.observe(bucket, was_cut=was_cut)
        curve.observe(bucket, was_cut=was_cut)
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
        curve = self._tenants.get((request.tenant, category))
        if curve is None or not curve.is_learned:
            curve = self._categories.get(category)
        return curve if curve is not None and curve.is_learned else None

    def state(self) -> dict[str, object]:
        """Everything learned (see `snapshot`)."""
        return {
            "categories": {category.value: curve.state() for category, curve in self._categories.items()},
            "tenants": [
                {"tenant": tenant, "category": category.value, "curve": curve.state()}
                for (tenant, category), curve in self._tenants.items()
            ],
        }

    def restore(self, state: Snapshot) -> None:
        """Restore what `state` returned (see `snapshot`)."""
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
