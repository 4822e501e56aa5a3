"""Limits of API keys, and the spending limit of a model.

- `KeyAccounts`: the usage of each key, and the check whether its next request is within its limits.
- `Spending`: the price of a model's tokens in the last hour, against its budget.

`KeyAccounts`. One scheduler decides for a model on behalf of all gateways, so the counts are exact. Rules:

- A request counts from its admission, that is once it may queue or run. Rejected requests do not count.
- `tokens_per_minute` is charged the estimate at admission and settled when the request ends. If the engine
  counted fewer tokens, the difference is returned to the second of the charge. If it counted more, the
  difference is charged at the end. Without a count, a request that reached no engine or failed there costs
  nothing. One that completed, or that its client cancelled after its dispatch, costs the estimate, and at
  least what was seen of its answer. An answer that fails after its beginning costs what was seen of it.
- A request that was put back remains counted and is not counted again.
- A new scheduler counts a request at its arrival time, so a request that was admitted before is admitted
  again if the former scheduler's decision was right.
- `concurrent` counts queued and running requests, `queued` counts queued ones. A put-back request may queue
  above the limit.
- The limits are those sent with the request, so changes to a key apply immediately.

`Spending`. For engines that are paid per token, such as those of another provider. Requests count at their
end. While the budget is used up, arriving requests are rejected; those that were admitted are completed, and
may exceed it.
"""

import bisect
import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Annotated

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.settings_base import FINITE_NOT_NEGATIVE, settings
from serve_app.errors import Conclusion, Outcome
from serve_app.request import KeyTerms, LimitStatus, RateLimitStatus, Request, Usage

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

    def state(self, now: float) -> list[tuple[float, float]]:
        """Return the age and the amount of each bucket, for the next scheduler."""
        return [(now - begin, amount) for begin, amount in self._buckets]

    def restore(self, state: list[tuple[float, float]], now: float) -> None:
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


# Amounts have a resolution of one second. A second counts until all of it is more than a minute old.
_MINUTE_WINDOW_S = 61


class MinuteWindow:
    """The amounts of the last minute. Times are seconds on one clock that does not go backwards."""

    __slots__ = ("_amounts", "_seconds", "used")

    def __init__(self) -> None:
        self._seconds: list[int] = []
        self._amounts: list[int] = []
        self.used = 0

    def __repr__(self) -> str:
        return f"<MinuteWindow used={self.used} seconds={len(self._seconds)}>"

    def expire(self, now: float) -> None:
        """Remove amounts older than a minute."""
        passed = bisect.bisect_right(self._seconds, now - _MINUTE_WINDOW_S)
        if passed:
            self.used -= sum(self._amounts[:passed])
            del self._seconds[:passed], self._amounts[:passed]

    def add(self, at: float, amount: int, now: float) -> None:
        """Add an amount at time `at`, which may be before `now`."""
        second = math.floor(at)
        if not amount or second + _MINUTE_WINDOW_S <= now:
            return
        index = self._index(second)
        if index < len(self._seconds) and self._seconds[index] == second:
            self._amounts[index] += amount
        else:
            self._seconds.insert(index, second)
            self._amounts.insert(index, amount)
        self.used += amount

    def subtract(self, at: float, amount: int) -> None:
        """Subtract a part of what was added at `at`, unless it has expired."""
        second = math.floor(at)
        index = self._index(second)
        if index < len(self._seconds) and self._seconds[index] == second:
            self._amounts[index] -= amount
            self.used -= amount
            if not self._amounts[index]:
                del self._seconds[index], self._amounts[index]

    def admits_in_s(self, amount: int, limit: int, now: float) -> float:
        """Return the seconds until an amount is within the limit: 0 if it is now, infinity if never."""
        self.expire(now)
        excess = self.used + amount - limit
        if excess <= 0:
            return 0.0
        for second, freed in zip(self._seconds, self._amounts, strict=True):
            excess -= freed
            if excess <= 0:
                return second + _MINUTE_WINDOW_S - now
        return math.inf

    def status(self, limit: int, now: float) -> LimitStatus:
        """Return the limit, what remains of it, and the seconds until all of it is available."""
        self.expire(now)
        reset_s = self._seconds[-1] + _MINUTE_WINDOW_S - now if self.used else 0.0
        return LimitStatus(limit, max(0, limit - self.used), reset_s)

    def _index(self, second: int) -> int:
        return bisect.bisect_left(self._seconds, second)


# Retry-After for the concurrency limit: the time until a running request ends is unknown.
_DEFAULT_RETRY_AFTER_S = 1.0
# Bound on memory: above this number of accounts, idle ones are removed.
_MAX_ACCOUNTS = 4_096


@dataclass(slots=True)
class _KeyAccount:
    """The usage of one key."""

    open_requests: int = 0
    requests: MinuteWindow = field(default_factory=MinuteWindow)
    tokens: MinuteWindow = field(default_factory=MinuteWindow)

    def is_idle(self, now: float) -> bool:
        self.requests.expire(now)
        self.tokens.expire(now)
        return not (self.open_requests or self.requests.used or self.tokens.used)


class KeyAccounts:
    """The usage of all keys at one model. Requests without a key are not counted."""

    def __init__(self) -> None:
        self._accounts: dict[str, _KeyAccount] = {}

    def __repr__(self) -> str:
        return f"<KeyAccounts keys={len(self._accounts)}>"

    def __len__(self) -> int:
        return len(self._accounts)

    def open_requests(self, key_id: str) -> int:
        """Return the number of a key's queued and running requests."""
        account = self._accounts.get(key_id)
        return account.open_requests if account is not None else 0

    def rejection(self, request: Request, estimate: TokenEstimate, now: float) -> Conclusion | None:
        """Return the rejection by the limit with the longest wait, or None if no limit is exceeded."""
        key = request.submission.key
        if key is None:
            return None
        account, limits = self._account(key, now), key.limits
        found: list[tuple[float, str]] = []
        if (limit := limits.requests_per_minute) is not None:
            wait_s = account.requests.admits_in_s(1, limit, now)
            used = f"{account.requests.used:,} were admitted in the last minute"
            found.append((wait_s, f"{limit:,} requests per minute, and {used}"))
        if (limit := limits.tokens_per_minute) is not None:
            amount = estimate.expected_tokens
            wait_s = account.tokens.admits_in_s(amount, limit, now)
            used = f"{account.tokens.used:,} are used and this request is estimated at {amount:,}"
            found.append((wait_s, f"{limit:,} tokens per minute: {used}"))
        if (limit := limits.concurrent) is not None:
            wait_s = _DEFAULT_RETRY_AFTER_S if account.open_requests >= limit else 0.0
            used = f"{account.open_requests:,} are queued or running"
            found.append((wait_s, f"{limit:,} concurrent requests, and {used}"))
        wait_s, text = max(found, default=(0.0, ""), key=lambda one: one[0])
        if wait_s == 0:
            return None
        return _rejection(text, wait_s)

    def on_admission(self, scheduled: ScheduledRequest, now: float) -> None:
        """Count a request that may queue or run."""
        key = scheduled.request.submission.key
        if key is None:
            return
        account, at = self._account(key, now), scheduled.request.arrived_at
        account.open_requests += 1
        if key.limits.requests_per_minute is not None:
            account.requests.add(at, 1, now)
        if key.limits.tokens_per_minute is not None:
            scheduled.key_charge = scheduled.estimate.expected_tokens
            account.tokens.add(at, scheduled.key_charge, now)

    def on_end(self, scheduled: ScheduledRequest, outcome: Outcome, now: float, *, dispatched: bool) -> None:
        """Settle an admitted request that has ended."""
        key = scheduled.request.submission.key
        if key is None:
            return
        account, at = self._account(key, now), scheduled.request.arrived_at
        account.open_requests -= 1
        if not dispatched and outcome.is_rejection and key.limits.requests_per_minute is not None:
            account.requests.expire(now)
            account.requests.subtract(at, 1)
        charge = scheduled.key_charge
        if charge is None:
            return
        usage = scheduled.used_after(outcome) if dispatched or scheduled.attempts.generated else None
        used = 0 if usage is None else usage.prompt_tokens + usage.output_tokens
        account.tokens.expire(now)
        if used < charge:
            account.tokens.subtract(at, charge - used)
        else:
            account.tokens.add(now, used - charge, now)

    def status(self, key: KeyTerms | None, now: float) -> RateLimitStatus | None:
        """Return the status of a key's limits per minute, or None if it has none."""
        if key is None:
            return None
        per_minute, tokens = key.limits.requests_per_minute, key.limits.tokens_per_minute
        if per_minute is None and tokens is None:
            return None
        account = self._account(key, now)
        return RateLimitStatus(
            account.requests.status(per_minute, now) if per_minute is not None else None,
            account.tokens.status(tokens, now) if tokens is not None else None,
        )

    def with_rate_limits(self, request: Request, conclusion: Conclusion, now: float) -> Conclusion:
        """Return a conclusion with the status of the key's limits added, for its client."""
        status = self.status(request.submission.key, now)
        return conclusion if status is None else replace(conclusion, rate_limits=status)

    def _account(self, key: KeyTerms, now: float) -> _KeyAccount:
        account = self._accounts.get(key.key_id)
        if account is None:
            if len(self._accounts) >= _MAX_ACCOUNTS:
                self._accounts = {name: one for name, one in self._accounts.items() if not one.is_idle(now)}
            account = self._accounts[key.key_id] = _KeyAccount()
        return account


def _rejection(text: str, wait_s: float) -> Conclusion:
    if wait_s == math.inf:
        message = f"this API key has a limit of {text}, which is more than the limit: send a smaller request"
        return Conclusion(Outcome.REJECTED_RATE_LIMITED, message)
    message = f"this API key has a limit of {text}: retry in {max(wait_s, 0.1):.1f} s"
    return Conclusion(Outcome.REJECTED_RATE_LIMITED, message, wait_s)
