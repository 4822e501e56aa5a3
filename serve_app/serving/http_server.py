"""An HTTP server on a socket and on an event loop of Ray, which owns the process with its signals.

It is uvicorn without signal handlers, started as a task on the running loop and stopped within a time limit.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from serve_app.errors import ServeAppError


class ServerEndedError(ServeAppError):
    """An HTTP server does not run."""


class HttpServer:
    """Serves by what `config` says, on sockets that listen already.

    Args:
        name: of what it serves, for messages and its task.
    """

    def __init__(self, name: str, config: uvicorn.Config) -> None:
        self._name = name
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"HttpServer({self._name}, connections={self.connections})"

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._server.server_state.connections)

    def open_connections(self) -> list[object]:
        """Each of them, made by the protocol of the configuration."""
        return list(self._server.server_state.connections)

    async def start(self, sock: socket.socket) -> None:
        """Take connections.

        Raises:
            ServerEndedError: it cannot.
        """
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]), name=f"http-{self._name}")
        while not self._server.started:
            self.check_health()
            await asyncio.sleep(0.005)

    def check_health(self) -> None:
        """Raise `ServerEndedError` when the server is not running."""
        if self._task is None:
            raise ServerEndedError(f"the HTTP server of {self._name} has not been started")
        if self._task.done():
            cause = None if self._task.cancelled() else self._task.exception()
            raise ServerEndedError(f"the HTTP server of {self._name} has ended") from cause

    async def renew_date(self) -> None:
        """Bring the header `date` of answers up to date, where they have one; nobody else does."""
        await self._server.on_tick(0)

    def stop_listening(self) -> None:
        """Take no more connections; those that are there go on."""
        for each in self._server.servers:
            each.close()

    async def stop(self, grace_s: float) -> None:
        """Close idle connections, wait up to `grace_s` seconds for open answers, then cut them."""
        if self._task is None or self._task.done():
            return
        # uvicorn reads this, in whole seconds, when it begins to shut down.
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.end()
        with contextlib.suppress(asyncio.CancelledError):
            # After the timeout the task is cancelled, which closes the remaining connections.
            await asyncio.wait([self._task], timeout=grace_s + 2.0)
        if not self._task.done():
            self._task.cancel()


class _QuietServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Begin to shut down."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Wait for the end; uvicorn looks ten times a second whether it has come, and dates its headers."""
        await self.on_tick(0)
        await self._ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Ray, which drains the whole replica on them."""
        yield
