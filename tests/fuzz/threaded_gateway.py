"""Gateway with real sockets in a thread, over an engine that answers every body."""

import asyncio
import contextlib
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from serve_app.engines.engine import Receive, Scope, Send
from serve_app.serving.gateway import Gateway
from tests.serving.gateway.builders import FakeDispatcher, gateway, serving

_ANSWER = {"id": "x", "object": "chat.completion", "created": 1, "model": "tiny", "choices": []}
_EVENTS = b'data: {"choices":[]}\n\ndata: [DONE]\n\n'


async def any_engine(scope: Scope, receive: Receive, send: Send) -> None:
    """Reject bodies that are no JSON object, as engines do, and answer the rest."""
    body = bytearray()
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message.get("body", b"")
    status, kind, answer = 200, b"application/json", json.dumps(_ANSWER).encode()
    try:
        streams = bool(json.loads(body).get("stream"))
    except (ValueError, AttributeError, RecursionError):
        streams, status = False, 400
        answer = b'{"error":{"message":"no JSON object","type":"BadRequestError","param":null,"code":400}}'
    if streams:
        kind, answer = b"text/event-stream", _EVENTS
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": answer})


@contextlib.asynccontextmanager
async def _running_gateway(app: Gateway, dispatcher: FakeDispatcher) -> AsyncIterator[int]:
    with tempfile.TemporaryDirectory() as folder:
        async with serving(any_engine) as engine, serving(app) as port:
            dispatcher.ports.append(engine)
            app.start_batches(Path(folder))
            yield port
        await app.drain(0.0, 1.0)
    app.close()


@contextlib.contextmanager
def gateway_in_a_thread() -> Iterator[str]:
    """Run such a gateway; yield its address."""
    started: threading.Event = threading.Event()
    found: list[str] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        dispatcher = FakeDispatcher([])
        async with _running_gateway(gateway(dispatcher, log_requests=False), dispatcher) as port:
            found.append(f"http://127.0.0.1:{port}")
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert started.wait(30)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
