"""What every engine's ASGI app needs to read."""

from serve_app.engines.engine import Receive


async def read_body(receive: Receive) -> bytes | None:
    """The whole body, of a size that the gateway has checked; None when the client left before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
