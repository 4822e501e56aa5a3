"""Connections from HAProxy, the only ones on a gateway's port: the gateway closes none for being idle.

The side that sends requests must be the one that closes. uvicorn closes an idle connection by a timer, and a
process that was held up meanwhile sees its timer before the request that has come: the request is lost, and
HAProxy must not send it again, since it cannot know that. HAProxy closes connections that it does not need
by itself, within seconds. A host that vanished is noticed by TCP.
"""

import asyncio
import socket

from serve_app.serving.http_heads import LimitedHeads


class FrontEndConnection(LimitedHeads):
    """uvicorn's side of one connection from HAProxy."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A connection has been opened."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def timeout_keep_alive_handler(self) -> None:
        """It has been idle for long, and stays open."""
