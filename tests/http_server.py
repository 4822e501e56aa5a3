"""HTTP servers for tests, on the event loop of the test."""

import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn
from uvicorn.lifespan.off import LifespanOff

from serve_app.engines.engine import ASGIApp
from serve_app.serving.http_heads import LimitedHeads


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp, port: int = 0, protocol: Callable[..., LimitedHeads] = LimitedHeads, keep_alive_s: int = 5
) -> AsyncIterator[int]:
    """Serve an ASGI app; yields the port. Answers that are open at the end are cut.

    It is uvicorn without `Server.serve`. That one looks ten times a second whether it shall end, and pauses
    once more before it does: a fifth of a second for each of a thousand tests.
    """
    config = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # whatever makes a connection
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        backlog=256,
        timeout_keep_alive=keep_alive_s,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = LifespanOff(config)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        await server.startup(sockets=[sock])
        # Once, for the headers that every answer bears.
        await server.on_tick(0)
        try:
            yield sock.getsockname()[1]
        finally:
            for each in server.servers:
                each.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
