"""The limits of API keys: what each key has used of them, and whether its next request keeps them.

One scheduler decides for a model, whichever gateway a request came to, so the counts are exact. Rules:

- A request is counted when it is admitted, which is when it may wait or run. One that is refused, for
  whatever reason, is not counted.
- `tokens_per_minute` is charged the estimate at admission, and settled when the request ends. What an engine
  counted less is given back to the second of the charge; what it counted more is charged at the end. Without
  a count, a request that reached no engine or failed there costs nothing. One that was completed, or that its
  client broke off in an engine, costs the estimate.
- A request that comes back from a replica stays counted, and is not counted again.
- A request that a new scheduler learns of is counted at the time of its arrival. So one that had been
  admitted is admitted again, as far as the former scheduler was right to.
- `concurrent` counts what waits or runs, `queued` what waits. A request that came back from a replica waits
  whatever the limit is.
- The limits are those that the request brought, so a key that is changed is judged by its new ones at once.
"""

import bisect
import math
from dataclasses import dataclass, field, replace

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.errors import Conclusion, Outcome
from serve_app.request import KeyTerms, LimitStatus, RateLimitStatus, Request

# The second in which something came counts until all of it is a minute old.
_KEPT_S = 61


class MinuteWindow:
    """The amounts of the last minute. All times are seconds on one clock; `now` never goes back."""

    __slots__ = ("_amounts", "_seconds", "used")

    def __init__(self) -> None:
        self._seconds: list[int] = []
        self._amounts: list[int] = []
        self.used = 0

    def __repr__(self) -> str:
        return f"<MinuteWindow used={self.used} seconds={len(self._seconds)}>"

    def expire(self, now: float) -> None:
        """Forget what is older than a minute."""
        passed = bisect.bisect_right(self._seconds, now - _KEPT_S)
        if passed:
            self.used -= sum(self._amounts[:passed])
            del self._seconds[:passed], self._amounts[:passed]

    def add(self, at: float, amount: int, now: float) -> None:
        """Count an amount that came at `at`, which may be before `now`."""
        second = math.floor(at)
        if not amount or second + _KEPT_S <= now:
            return
        index = self._index(second)
        if index < len(self._seconds) and self._seconds[index] == second:
            self._amounts[index] += amount
        else:
            self._seconds.insert(index, second)
            self._amounts.insert(index, amount)
        self.used += amount

    def take_back(self, at: float, amount: int) -> None:
        """Undo a part of what was added at `at`, unless it has expired."""
        second = math.floor(at)
        index = self._index(second)
        if index < len(self._seconds) and self._seconds[index] == second:
            self._amounts[index] -= amount
            self.used -= amount

    def admits_in_s(self, amount: int, limit: int, now: float) -> float:
        """Seconds until an amount keeps the limit: 0 when it does now, infinite when it never will."""
        self.expire(now)
        excess = self.used + amount - limit
        if excess <= 0:
            return 0.0
        for second, freed in zip(self._seconds, self._amounts, strict=True):
            excess -= freed
            if excess <= 0:
                return second + _KEPT_S - now
        return math.inf

    def status(self, limit: int, now: float) -> LimitStatus:
        """How a limit stands."""
        self.expire(now)
        reset_s = self._seconds[-1] + _KEPT_S - now if self.used else 0.0
        return LimitStatus(limit, max(0, limit - self.used), reset_s)

    def _index(self, second: int) -> int:
        return bisect.bisect_left(self._seconds, second)


# When a place among the concurrent ones is free, nobody knows.
_UNKNOWN_S = 1.0
# Accounts beyond these are looked through for some that nothing is counted in.
_KEPT = 4_096
# Ends after which an engine has worked for the client, although it may not have said how much.
_SERVED = frozenset({Outcome.COMPLETED, Outcome.CANCELLED})


@dataclass(slots=True)
class _KeyAccount:
    """What one key has used."""

    open_requests: int = 0
    requests: MinuteWindow = field(default_factory=MinuteWindow)
    tokens: MinuteWindow = field(default_factory=MinuteWindow)

    def is_idle(self, now: float) -> bool:
        self.requests.expire(now)
        self.tokens.expire(now)
        return not (self.open_requests or self.requests.used or self.tokens.used)


class KeyAccounts:
    """The accounts of all keys at one model. Requests without a key have none."""

    def __init__(self) -> None:
        self._accounts: dict[str, _KeyAccount] = {}

    def __repr__(self) -> str:
        return f"<KeyAccounts keys={len(self._accounts)}>"

    def __len__(self) -> int:
        return len(self._accounts)

    def open_requests(self, key_id: str) -> int:
        """Requests of a key that wait or run."""
        account = self._accounts.get(key_id)
        return account.open_requests if account is not None else 0

    def refuse(self, request: Request, estimate: TokenEstimate, now: float) -> Conclusion | None:
        """The refusal of a request that would exceed a limit of its key; of several, the one that lasts."""
        key = request.submission.key
        if key is None:
            return None
        account, limits = self._account(key, now), key.limits
        found: list[tuple[float, str]] = []
        if (limit := limits.requests_per_minute) is not None:
            wait_s = account.requests.admits_in_s(1, limit, now)
            found.append((wait_s, f"{limit:,} requests per minute, and that many came in the last one"))
        if (limit := limits.tokens_per_minute) is not None:
            amount = estimate.expected_tokens
            wait_s = account.tokens.admits_in_s(amount, limit, now)
            used = f"{account.tokens.used:,} are used and this request is estimated at {amount:,}"
            found.append((wait_s, f"{limit:,} tokens per minute: {used}"))
        if (limit := limits.concurrent) is not None:
            wait_s = _UNKNOWN_S if account.open_requests >= limit else 0.0
            found.append((wait_s, f"{limit:,} requests at once, and that many wait or run"))
        wait_s, text = max(found, default=(0.0, ""), key=lambda one: one[0])
        if wait_s == 0:
            return None
        return _refusal(text, wait_s)

    def on_admission(self, scheduled: ScheduledRequest, now: float) -> None:
        """A request waits or runs from now on."""
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
        """An admitted request is over.

        Args:
            dispatched: it had been sent to a replica.
        """
        key = scheduled.request.submission.key
        if key is None:
            return
        account, at = self._account(key, now), scheduled.request.arrived_at
        account.open_requests -= 1
        if not dispatched and outcome.is_rejection and key.limits.requests_per_minute is not None:
            account.requests.expire(now)
            account.requests.take_back(at, 1)
        charge, usage = scheduled.key_charge, scheduled.usage
        if charge is None:
            return
        if usage is not None:
            used = usage.prompt_tokens + usage.output_tokens
        else:
            used = charge if dispatched and outcome in _SERVED else 0
        account.tokens.expire(now)
        if used < charge:
            account.tokens.take_back(at, charge - used)
        else:
            account.tokens.add(now, used - charge, now)

    def status(self, key: KeyTerms | None, now: float) -> RateLimitStatus | None:
        """How the limits per minute of a key stand; None where it has none."""
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

    def described(self, request: Request, conclusion: Conclusion, now: float) -> Conclusion:
        """A conclusion that its client hears of, with how the limits of the key stand."""
        status = self.status(request.submission.key, now)
        return conclusion if status is None else replace(conclusion, rate_limits=status)

    def _account(self, key: KeyTerms, now: float) -> _KeyAccount:
        account = self._accounts.get(key.key_id)
        if account is None:
            if len(self._accounts) >= _KEPT:
                self._accounts = {name: one for name, one in self._accounts.items() if not one.is_idle(now)}
            account = self._accounts[key.key_id] = _KeyAccount()
        return account


def _refusal(text: str, wait_s: float) -> Conclusion:
    if wait_s == math.inf:
        message = f"this API key has a limit of {text}, which is more than the limit: send a smaller request"
        return Conclusion(Outcome.REJECTED_RATE_LIMITED, message)
    message = f"this API key has a limit of {text}: come again in {max(wait_s, 0.1):.1f} s"
    return Conclusion(Outcome.REJECTED_RATE_LIMITED, message, wait_s)
