"""Who was served while a request waited: counted when somebody asks, from the dispatches that are kept."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from serve_app.serving.scheduler.receipts.receipt import Attempt

MOST_NAMED = 10
"""Tenants and classes that are named; the others are counted together."""
# Dispatches between two breaths of the event loop: about half a millisecond.
_LOOKED_AT = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitedFor:
    """A wait for places of a pool.

    Attributes:
        since: when it began, on the scheduler's clock.
        until: when it ended.
        before: the number of its own dispatch, which ended it; one above all there were, without one.
    """

    request_id: str
    pool: str
    since: float
    until: float
    before: int


async def served_during(wait: WaitedFor, attempts: Iterable[Attempt], *, is_complete: bool) -> dict[str, Any]:
    """Whose requests were sent to the pool meanwhile, by class and tenant.

    Args:
        attempts: all that may count.
        is_complete: none that would count is missing there.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for looked_at, attempt in enumerate(attempts, start=1):
        if looked_at % _LOOKED_AT == 0:
            # Others have waited long enough for this look.
            await asyncio.sleep(0)
        if (
            wait.since <= attempt.at <= wait.until
            and attempt.number < wait.before
            and attempt.dispatch.pool == wait.pool
            and attempt.dispatch.request_id != wait.request_id
        ):
            counts[attempt.priority, attempt.tenant] += 1
    named = counts.most_common(MOST_NAMED)
    return {
        "pool": wait.pool,
        "requests": counts.total(),
        "by": [
            {"class": priority, "tenant": tenant, "requests": count} for (priority, tenant), count in named
        ],
        "others": counts.total() - sum(count for _, count in named),
        "is_complete": is_complete,
    }
