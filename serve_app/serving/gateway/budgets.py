"""Budgets of API keys: tokens and money per day and month (UTC), over all models.

The schedulers count what each key has used (`scheduler.usage`), and survive a gateway. Each gateway reads the
counts of the keys that are in use about once per second, and rejects requests of a key whose budget is spent.
Requests in flight, and those of the last second, are completed and may exceed it.

A scheduler that does not respond counts with its last answer, in the day and month of that answer. Before its
first one, it counts nothing: a budget must not stop all traffic because one scheduler is being replaced.

All requests of a key that was idle wait for one read, because the counts may have changed since its last one.
"""

import asyncio
import contextvars
import logging
from collections.abc import Coroutine, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from time import monotonic

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.api_keys import KeyRecord
from serve_app.serving.channel.scheduler_client import SchedulerQueries
from serve_app.serving.gateway.answer.responses import RequestRejected

logger = logging.getLogger("ray.serve")

_INTERVAL_S = 1.0
_RESPONSE_TIMEOUT_S = 1.0
# A key that has sent nothing for this long is no longer watched.
_IDLE_S = 60.0

PERIODS = ("day", "month")
_NEVER: tuple[date, Mapping[str, Mapping[str, list[int]]]] = (date.min, {})


class BudgetExceeded(RequestRejected):
    """The budget of a key is used up; a retry is useful only once it resets."""

    may_retry = False

    def __init__(self, message: str, reset_s: float) -> None:
        # OpenAI's code for an account without credit, which its SDKs do not retry.
        super().__init__(
            Outcome.REJECTED_RATE_LIMITED, message, code="insufficient_quota", retry_after_s=reset_s
        )


class Budgets:
    """Spending of the keys with a budget, as read from the schedulers.

    Args:
        prices: by model name; a model without prices costs nothing.
    """

    def __init__(self, queries: Mapping[str, SchedulerQueries], prices: Mapping[str, TokenPrices]) -> None:
        self._queries, self._prices = queries, prices
        # Time of the last request, by key.
        self._watched: dict[str, float] = {}
        # Date and counts by period and model name, by scheduler and key.
        self._counts: dict[str, dict[str, tuple[date, Mapping[str, Mapping[str, list[int]]]]]] = {}
        # Reads of keys that were idle.
        self._reads: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Budgets watched={len(self._watched)}>"

    async def check(self, key: KeyRecord) -> None:
        """Check the budgets of a key.

        Raises:
            BudgetExceeded: one is used up.
        """
        if key.id not in self._watched:
            self._reads[key.id] = _independent(self.read([key.id]))
            self._reads[key.id].add_done_callback(lambda _: self._reads.pop(key.id, None))
        self._watched[key.id] = monotonic()
        if self._task is None:
            self._task = _independent(self._watch())
        if (read := self._reads.get(key.id)) is not None:
            # Shielded, because other requests wait for it, too.
            await asyncio.shield(read)
        for period in PERIODS:
            tokens, cost = self.spent(key.id, period)
            limits = key.budget(period)
            if limits.tokens is not None and tokens >= limits.tokens:
                raise _exceeded(f"{limits.tokens:,} tokens per {period}", f"{tokens:,}", period)
            if limits.cost is not None and cost >= limits.cost:
                raise _exceeded(f"{limits.cost:.6g} per {period}", f"{cost:.6g}", period)

    async def read(self, keys: Sequence[str]) -> None:
        """Read what keys have used from all schedulers."""
        await asyncio.gather(*(self._read_one(model, each, keys) for model, each in self._queries.items()))

    def spent(self, key_id: str, period: str) -> tuple[int, float]:
        """Return the tokens and the cost of a key in the current day or month."""
        tokens, cost, today = 0, 0.0, datetime.now(UTC).date()
        begins = today.replace(day=1) if period == "month" else today
        for counts in self._counts.values():
            read_on, by_period = counts.get(key_id, _NEVER)
            if read_on < begins:
                continue
            for model, figures in by_period.get(period, {}).items():
                used, price = tokens_of(figures), self._prices.get(model)
                tokens += used.prompt_tokens + used.output_tokens
                cost += 0.0 if price is None else price.of(used)
        return tokens, cost

    def close(self) -> None:
        """Stop reading."""
        for task in (self._task, *self._reads.values()):
            if task is not None:
                task.cancel()

    async def _watch(self) -> None:
        while self._watched:
            await asyncio.sleep(_INTERVAL_S)
            idle_since = monotonic() - _IDLE_S
            self._watched = {key: at for key, at in self._watched.items() if at >= idle_since}
            await self.read(list(self._watched))
        self._task = None

    async def _read_one(self, model: str, scheduler: SchedulerQueries, keys: Sequence[str]) -> None:
        try:
            answer = await asyncio.wait_for(scheduler.query("spent", keys=list(keys)), _RESPONSE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever keeps one scheduler from answering
            logger.debug("event=budget_unread model=%s reason=%r", model, error)
        else:
            today = datetime.now(UTC).date()
            self._counts.setdefault(model, {}).update({key: (today, answer.get(key, {})) for key in keys})


def _independent(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Start a task in an empty context, because Ray Serve cancels a request's tasks with the request."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


def tokens_of(figures: list[int]) -> Usage:
    """Convert the counts of a row of the usage ledger: requests, prompt, cached and output tokens."""
    _, prompt, cached, generated = figures
    return Usage(prompt_tokens=prompt, cached_tokens=cached, output_tokens=generated)


def _exceeded(limit: str, spent: str, period: str) -> BudgetExceeded:
    now = datetime.now(UTC)
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    reset = today + timedelta(days=1)
    if period == "month":
        # The 32nd day after a first is in the next month.
        reset = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    return BudgetExceeded(
        f"this API key has a budget of {limit} and has used {spent}: it resets at {reset:%Y-%m-%d %H:%M} UTC",
        (reset - now).total_seconds(),
    )
