"""Work in the background: engines go on with a response when its request has been answered.

Nothing tells of its end but the response itself. So the gateway asks for it now and then, and the place of
the request on its replica stays taken until it has ended. What cannot be known:

- when its first token comes;
- anything at all, once the gateway has ended that passed the request on. Its work is not counted from then
  on, though the engine's reports still show its load.
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
from serve_app.serving.gateway.stored.holders import AnsweredResponse, answered_response
from serve_app.serving.gateway.upstream.pool import UpstreamPool
from serve_app.serving.gateway.upstream.response import UpstreamError

logger = logging.getLogger("ray.serve")

# An engine finds it in a table, which costs it about as much as one page of metrics.
_EVERY_S = 1.0
_MOST_FAILURES = 5
_OUTCOMES = {
    "completed": Outcome.COMPLETED,
    "incomplete": Outcome.COMPLETED,
    "cancelled": Outcome.CANCELLED,
}

OnEnd = Callable[[Outcome, Usage | None, str], None]
"""How the work ended, what it took, and a word on it for the log."""


class BackgroundWork:
    """Follows responses until their engines have finished them.

    Args:
        every_s: between two looks at a response, in seconds.
    """

    def __init__(self, upstream: UpstreamPool, every_s: float = _EVERY_S) -> None:
        self._upstream = upstream
        self._every_s = every_s
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<BackgroundWork {len(self._tasks)}>"

    def __len__(self) -> int:
        """Responses that are being followed."""
        return len(self._tasks)

    def follow(self, response_id: str, replica: ReplicaAddress, on_end: OnEnd) -> None:
        """Ask for a response until it has ended."""
        loop = asyncio.get_running_loop()
        # In a context of its own: Serve cancels whatever it finds in that of a request.
        task = loop.create_task(
            self._follow(response_id, replica, on_end),
            name=f"background {response_id}",
            context=contextvars.Context(),
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Follow none any more; what they run is nobody's to give back then."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _follow(self, response_id: str, replica: ReplicaAddress, on_end: OnEnd) -> None:
        try:
            end = await self._end_of(response_id, replica)
        except Exception as error:
            # Whatever it is, the place must be given back.
            logger.exception("event=background_fault response=%r", response_id)
            end = Outcome.FAILED, None, f"in the background: {error!r}"
        on_end(*end)

    async def _end_of(self, response_id: str, replica: ReplicaAddress) -> tuple[Outcome, Usage | None, str]:
        failures, why = 0, ""
        while failures < _MOST_FAILURES:
            await asyncio.sleep(self._every_s)
            try:
                status, body = await self._look(response_id, replica)
            except UpstreamError as error:
                failures, why = failures + 1, str(error)
                continue
            response = answered_response(body) if status == 200 else AnsweredResponse()
            if response.is_under_way:
                failures = 0
            elif response.status in _OUTCOMES:
                return _OUTCOMES[response.status], usage_of(body), f"in the background: {response.status}"
            elif status == 404 or response.status:
                why = f"the engine answered {status} {response.status}"
                break
            else:
                failures, why = failures + 1, f"the engine answered {status}"
        return Outcome.FAILED, None, f"in the background: {why}"

    async def _look(self, response_id: str, replica: ReplicaAddress) -> tuple[int, bytes]:
        head = engine_head(replica, f"/v1/responses/{response_id}")
        response = await self._upstream.send(replica.server, head, b"")
        try:
            return response.status, await response.read()
        finally:
            response.close()
