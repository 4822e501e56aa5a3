"""Real emulated engine behind a real HTTP server, in its own thread."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings


@contextmanager
def emulated_endpoint(settings: EmulatedEngineSettings) -> Iterator[str]:
    """Serve the engine; yield its URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    # asyncio leaves Nagle on for sockets created elsewhere: first tokens would arrive 40 ms late.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        engine = EmulatedEngine(settings)
        await engine.start()
        server = uvicorn.Server(uvicorn.Config(engine.app, log_level="error", lifespan="off"))
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        ready.set()
        await asyncio.to_thread(stop.wait)
        server.should_exit = True
        await serving
        await engine.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        stop.set()
        thread.join(30)
