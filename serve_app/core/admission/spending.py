"""Spending limit of a model: the price of its tokens in the last hour, against a budget.

For engines that are paid per token, such as those of another provider. Requests count at their end. While the
budget is used up, arriving requests are rejected; those that were admitted are completed, and may exceed it.
"""

import math
from collections import deque
from typing import Annotated

from serve_app.core.request import ScheduledRequest
from serve_app.core.settings_base import FINITE_NOT_NEGATIVE, settings
from serve_app.errors import Conclusion, Outcome
from serve_app.request import Usage

_WINDOW_S = 3_600.0
# Amounts have this resolution; a bucket counts until all of it is older than the window.
_BUCKET_S = 60.0
_PRICED_TOKENS = 1e6


@settings(block="price")
class TokenPrices:
    """Prices per million tokens, in a currency of your choice.

    Attributes:
        prompt: of prompt tokens.
        generated: of output tokens.
        cached: of prompt tokens that the engine has cached; by default that of other prompt tokens.
    """

    prompt: Annotated[float, FINITE_NOT_NEGATIVE]
    generated: Annotated[float, FINITE_NOT_NEGATIVE]
    cached: Annotated[float | None, FINITE_NOT_NEGATIVE] = None

    def of(self, usage: Usage) -> float:
        """Return the price of a request."""
        cached = self.prompt if self.cached is None else self.cached
        prompt = (usage.prompt_tokens - usage.cached_tokens) * self.prompt
        return (prompt + usage.cached_tokens * cached + usage.output_tokens * self.generated) / _PRICED_TOKENS


class Spending:
    """Spending of one model in the last hour. Times are seconds on one clock that does not go backwards.

    Args:
        per_hour: the budget; None for no limit.
    """

    def __init__(self, price: TokenPrices | None, per_hour: float | None) -> None:
        self._price, self._per_hour = price, per_hour
        # Begin of each bucket, and its amount.
        self._buckets: deque[tuple[float, float]] = deque()

    def __repr__(self) -> str:
        return f"<Spending {math.fsum(amount for _, amount in self._buckets):g} of {self._per_hour}>"

    def on_end(self, scheduled: ScheduledRequest, outcome: Outcome, now: float) -> None:
        """Count a request that was dispatched and has ended."""
        if self._price is None or self._per_hour is None:
            return
        usage = scheduled.used_after(outcome)
        if usage is not None:
            self._add(now, self._price.of(usage))

    def rejection(self, now: float) -> Conclusion | None:
        """Return the rejection while the budget is used up, or None."""
        if self._per_hour is None:
            return None
        self._expire(now)
        # Summed anew, because differences of sums would drift.
        spent = math.fsum(amount for _, amount in self._buckets)
        if spent < self._per_hour:
            return None
        remaining, free_at = spent, now
        for begin, amount in self._buckets:
            remaining, free_at = remaining - amount, begin + _BUCKET_S + _WINDOW_S
            if remaining < self._per_hour:
                break
        message = f"this model may cost {self._per_hour:g} per hour, and the last hour has cost {spent:.4g}"
        return Conclusion(Outcome.REJECTED_QUEUE_FULL, message, free_at - now)

    def state(self, now: float) -> list[list[float]]:
        """Return the age and the amount of each bucket, for the next scheduler."""
        return [[now - begin, amount] for begin, amount in self._buckets]

    def restore(self, state: list[list[float]], now: float) -> None:
        """Restore a result of `state`.

        Raises:
            ValueError: it is invalid.
        """
        buckets = [(now - age_s, amount) for age_s, amount in state]
        if buckets != sorted(buckets) or not all(begin <= now and amount >= 0 for begin, amount in buckets):
            raise ValueError(f"spending must have ages that fall and amounts of 0 or more, got {state}")
        self._buckets = deque(buckets)

    def _add(self, now: float, amount: float) -> None:
        self._expire(now)
        if self._buckets and now < self._buckets[-1][0] + _BUCKET_S:
            begin, before = self._buckets.pop()
            self._buckets.append((begin, before + amount))
        else:
            self._buckets.append((now, amount))

    def _expire(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] + _BUCKET_S + _WINDOW_S <= now:
            self._buckets.popleft()
