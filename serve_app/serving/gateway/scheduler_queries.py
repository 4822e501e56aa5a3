"""Admin queries to schedulers, which a gateway forwards over the control channel."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import SchedulerQueries
from serve_app.serving.gateway.answer.responses import RequestRejected

# The caller is interactive, and a healthy scheduler answers sooner.
QUERY_TIMEOUT_S = 5.0

Query = Callable[[str, SchedulerQueries], Awaitable[Mapping[str, Any]]]
"""A query to a model's scheduler, given the model's name."""


async def query_scheduler(model: str, scheduler: SchedulerQueries, query: str, **arguments: Any) -> Any:
    """Query the scheduler of one model.

    Raises:
        RequestRejected: it does not answer.
    """
    try:
        return await asyncio.wait_for(scheduler.query(query, **arguments), QUERY_TIMEOUT_S)
    except Exception as error:
        message = f"the scheduler of {model} does not respond: {error!r}; retry later"
        raise RequestRejected(Outcome.REJECTED_NO_REPLICA, message, retry_after_s=1.0) from error


async def query_all(
    queries: Mapping[str, SchedulerQueries],
    query: Query,
) -> list[Mapping[str, Any]]:
    """Query each model's scheduler; a failed query yields the model's name and the error."""
    answers: list[Mapping[str, Any]] = []
    for model, scheduler in queries.items():
        try:
            answers.append(await asyncio.wait_for(query(model, scheduler), QUERY_TIMEOUT_S))
        except Exception as error:  # noqa: BLE001 - whatever keeps one scheduler from answering
            answers.append({"model": model, "error": f"its scheduler does not respond: {error!r}"})
    return answers
