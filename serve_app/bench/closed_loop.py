"""A fixed number of clients, each sending its next request when its last is answered.

Not a model of users: it holds the concurrency still, which is what a cost per request is measured at.
"""

import asyncio
from dataclasses import dataclass, field

from serve_app.bench.answer import Answer
from serve_app.bench.bodies import BodyFactory
from serve_app.bench.connection import BenchError, ConnectionPool
from serve_app.workloads.trace import TraceRequest


@dataclass(slots=True)
class ClosedLoop:
    """Sends one kind of request from `concurrency` clients.

    Args:
        answer_timeout_s: longest time that any answer may take.
    """

    pool: ConnectionPool
    bodies: BodyFactory
    request: TraceRequest
    stream: bool
    answer_timeout_s: float = 60.0
    _sent: int = 0
    _latencies_s: list[tuple[float, float]] = field(default_factory=list)

    async def run(self, concurrency: int, requests: int) -> list[tuple[float, float]]:
        """Send `requests` in all.

        Returns:
            Seconds to the first token and to the end of each request, in the order of their ends; without a
            stream both are the time to the end.

        Raises:
            BenchError: a request did not complete; a cost per request would mean nothing.
        """
        self._latencies_s = []
        clients = [
            self._client(requests // concurrency + (i < requests % concurrency)) for i in range(concurrency)
        ]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client)
        return self._latencies_s

    async def _client(self, requests: int) -> None:
        loop = asyncio.get_running_loop()
        connection = await self.pool.open()
        for _ in range(requests):
            if not connection.is_open:
                connection = await self.pool.open()
            ended: asyncio.Future[Answer] = loop.create_future()
            answer = Answer(stream=self.stream, on_end=ended.set_result)
            self._sent += 1
            started_at = loop.time()
            connection.start(self.bodies.make(self._sent, self.request), answer)
            async with asyncio.timeout(self.answer_timeout_s):
                await ended
            if answer.outcome != "completed":
                raise BenchError(f"a request ended as {answer.outcome}: {answer.detail}")
            first = answer.first_token_at or answer.finished_at
            self._latencies_s.append((first - started_at, answer.finished_at - started_at))
