"""A fixed number of clients, each sending its next request when its last is answered.

Not a model of users: it holds the concurrency still, which is what a cost per request is measured at.
"""

import asyncio
import time
from dataclasses import dataclass, field

from serve_app.bench.answer import Answer
from serve_app.bench.bodies import BodyFactory
from serve_app.bench.connection import BenchError, ConnectionPool
from serve_app.workloads.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Exchange:
    """One answered request.

    Attributes:
        first_s: from sending to the first token; to the end, when the answer does not stream.
        whole_s: from sending to the end.
        reads: in how many pieces the answer came.
    """

    first_s: float
    whole_s: float
    reads: int


@dataclass(slots=True)
class ClosedLoop:
    """Sends one kind of request.

    Attributes:
        stream: whether `bodies` ask for streams.
        answer_timeout_s: longest time that any answer may take.
    """

    pool: ConnectionPool
    bodies: BodyFactory
    request: TraceRequest
    stream: bool
    answer_timeout_s: float = 60.0
    _sent: int = field(init=False, default=0)
    _exchanges: list[Exchange] = field(init=False, default_factory=list)

    async def run(self, concurrency: int, requests: int) -> list[Exchange]:
        """Send `requests` in all from `concurrency` clients; returns them in the order of their ends.

        Raises:
            BenchError: a request did not complete in time; a cost per request would mean nothing.
        """
        self._exchanges = []
        try:
            async with asyncio.TaskGroup() as group:
                for client in range(concurrency):
                    share = requests // concurrency + (client < requests % concurrency)
                    group.create_task(self._client(share))
        except ExceptionGroup as failures:
            # The first ends the rest; one reason is enough.
            raise BenchError(str(failures.exceptions[0])) from failures
        return self._exchanges

    async def _client(self, requests: int) -> None:
        loop = asyncio.get_running_loop()
        connection = await self.pool.open()
        try:
            for _ in range(requests):
                if not connection.is_open:
                    connection = await self.pool.open()
                ended: asyncio.Future[Answer] = loop.create_future()
                answer = Answer(stream=self.stream, on_end=ended.set_result)
                self._sent += 1
                request = self.bodies.make(self._sent, self.request)
                started_at, reads = time.monotonic(), connection.reads
                connection.start(request, answer)
                try:
                    async with asyncio.timeout(self.answer_timeout_s):
                        await ended
                except TimeoutError as exc:
                    raise BenchError(f"a request had no end after {self.answer_timeout_s:g} s") from exc
                if answer.outcome != "completed":
                    raise BenchError(f"a request ended as {answer.outcome}: {answer.detail}")
                first_s = (answer.first_token_at or answer.finished_at) - started_at
                whole_s = answer.finished_at - started_at
                self._exchanges.append(Exchange(first_s, whole_s, connection.reads - reads))
        finally:
            self.pool.discard(connection)
