"""Reading requests and sending responses in ASGI, for the engines' apps and the guard in front of them."""

from collections.abc import Iterable

from serve_app.engines.engine import Receive, Scope, Send

Headers = Iterable[tuple[bytes, bytes]]


def require_http(scope: Scope) -> None:
    """Raise unless the scope is HTTP: the replica's server sends neither lifespan events nor websockets."""
    if scope["type"] != "http":
        raise RuntimeError(f"an engine serves HTTP only, got {scope['type']}")


async def read_body(receive: Receive) -> bytes | None:
    """The whole body, whose size the gateway has checked; None when the client leaves before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected, or the response has ended."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_response(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = b"application/json",
    more_headers: Headers = (),
) -> None:
    """Send a whole response."""
    headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(body)),
        *more_headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
