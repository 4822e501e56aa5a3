"""Real HTTP servers for tests: an ASGI app on a free port, and a TCP server that breaks its word."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from serve_app.engines.engine import ASGIApp
from serve_app.errors import EngineError
from serve_app.serving.pool.server import ReplicaServer, ReplicaServerSettings


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, port: int = 0) -> AsyncIterator[str]:
    """Serve the app as a replica does; gives its base URL."""
    server = ReplicaServer(app, "127.0.0.1", ReplicaServerSettings(port=port))
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop(grace_s=1.0)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    """Until the condition holds; an engine that fails counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(EngineError):
            if await condition():
                return
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def tcp_server(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that reads and writes bytes as the test likes; gives its base URL."""
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
