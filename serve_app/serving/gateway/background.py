"""Background work: engines continue a response after its request has been answered.

Only the response itself shows when it ends, so the gateway polls it. Until then the request holds its
capacity on the replica. Two things are unknown:

- the time of its first token;
- its remaining work once the gateway that forwarded the request has ended. The request is then no longer
  counted, but the engine's reports still include its load.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable

from serve_app.errors import Outcome
from serve_app.request import Usage
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.gateway.answer.stream import usage_of
from serve_app.serving.gateway.request.headers import engine_head
from serve_app.serving.gateway.response_holders import AnsweredResponse, answered_response
from serve_app.serving.gateway.upstream.pool import UpstreamPool
from serve_app.serving.gateway.upstream.response import UpstreamError

logger = logging.getLogger("ray.serve")

# A look-up in a table for an engine, about as expensive as a scrape of its metrics.
_EVERY_S = 1.0
_MAX_FAILURES = 5
_OUTCOMES = {
    "completed": Outcome.COMPLETED,
    "incomplete": Outcome.COMPLETED,
    "cancelled": Outcome.CANCELLED,
}

OnEnd = Callable[[Outcome, Usage | None, str], None]
"""Called with the outcome, the usage and a detail for the log."""


class BackgroundWork:
    """Poller of background responses until their engines finish them."""

    def __init__(self, upstream: UpstreamPool, every_s: float = _EVERY_S) -> None:
        self._upstream = upstream
        self._every_s = every_s
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<BackgroundWork {len(self._tasks)}>"

    def __len__(self) -> int:
        """Return the number of responses that are polled."""
        return len(self._tasks)

    def follow(self, response_id: str, replica: ReplicaAddress, on_end: OnEnd) -> None:
        """Poll a response until it ends, then call `on_end`."""
        loop = asyncio.get_running_loop()
        # In an empty context, because Serve cancels the tasks of a request's context.
        task = loop.create_task(
            self._follow(response_id, replica, on_end),
            name=f"background {response_id}",
            context=contextvars.Context(),
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop polling; the capacity of unfinished responses is not released here."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _follow(self, response_id: str, replica: ReplicaAddress, on_end: OnEnd) -> None:
        try:
            end = await self._end_of(response_id, replica)
        except Exception as error:
            # Release the capacity on any error.
            logger.exception("event=background_error response=%r", response_id)
            end = Outcome.FAILED, None, f"in the background: {error!r}"
        on_end(*end)

    async def _end_of(self, response_id: str, replica: ReplicaAddress) -> tuple[Outcome, Usage | None, str]:
        failures, why = 0, ""
        while failures < _MAX_FAILURES:
            await asyncio.sleep(self._every_s)
            try:
                status, body = await self._fetch(response_id, replica)
            except UpstreamError as error:
                failures, why = failures + 1, str(error)
                continue
            response = answered_response(body) if status == 200 else AnsweredResponse()
            if response.is_running:
                failures = 0
            elif response.status in _OUTCOMES:
                return _OUTCOMES[response.status], usage_of(body), f"in the background: {response.status}"
            elif status == 404 or response.status:
                why = f"the engine answered {status} {response.status}"
                break
            else:
                failures, why = failures + 1, f"the engine answered {status}"
        return Outcome.FAILED, None, f"in the background: {why}"

    async def _fetch(self, response_id: str, replica: ReplicaAddress) -> tuple[int, bytes]:
        head = engine_head(replica, f"/v1/responses/{response_id}")
        response = await self._upstream.send(replica.server, head, b"")
        try:
            return response.status, await response.read()
        finally:
            response.close()
