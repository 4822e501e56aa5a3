"""Connections from HAProxy, the only ones on a gateway's port: the gateway closes none for being idle.

The side that sends requests must be the one that closes. uvicorn closes an idle connection by a timer, and a
process that was held up meanwhile sees its timer before the request that has come: the request is lost, and
HAProxy must not send it again, since it cannot know that. HAProxy closes connections that it does not need
by itself, within seconds. A host that vanished is noticed by TCP.

Requests for the gateway pass Serve by, where `ingress` lets them.

A client may offer to go on in another protocol, as Java's HttpClient does with `Upgrade: h2c`. HAProxy drops
such offers. The parser takes what follows the head for the other protocol, and not for a body. So a head
whose offer is not taken up is parsed again without it.
"""

import asyncio
import socket
import sys
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serve_app.engines.engine import ASGIApp, Scope
from serve_app.serving.gateway.answer.client_stream import EXTENSION
from serve_app.serving.gateway.front.exchange import Exchange, ExchangeTerms
from serve_app.serving.gateway.front.ingress import Ingress, ingress_of
from serve_app.serving.http_heads import LimitedHeads, serve_connections_with

# How long the rest of a body may take whose request has been answered.
_REST_OF_BODY_S = 5.0
_OF_OFFERS = frozenset({b"upgrade", b"http2-settings"})


class FrontEndConnection(LimitedHeads):
    """uvicorn's side of one connection from HAProxy.

    Args:
        gateway: serves what need not go through Serve.

    Attributes:
        ingress: tells what is for the gateway; None when nothing is but through Serve.
        peer_is_client: who has connected is the client itself, and no front end.
    """

    peer_is_client = False

    def __init__(self, gateway: ASGIApp, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._gateway = gateway
        # The bytes that are being parsed.
        self._received = b""
        self.ingress: Ingress | None = ingress_of(self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A connection has been opened."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over, and so is what goes on on it."""
        super().connection_lost(exc)
        if (exchange := self._exchange) is not None:
            exchange.client_gone()
        for waiting, _ in self.pipeline:
            waiting.disconnected = True

    def resume_writing(self) -> None:
        """What was written has been read."""
        super().resume_writing()
        if (exchange := self._exchange) is not None:
            exchange.has_room()

    def on_headers_complete(self) -> None:
        """A head is complete: its request begins, or waits for the one before it."""
        self.head_is_complete()
        parser, scope = self.parser, self.scope
        version = parser.get_http_version()
        scope["method"] = parser.get_method().decode("ascii")
        if version != "1.1":
            scope["http_version"] = version
        if self._offers_upgrade():
            return
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["path"] = self.root_path + (unquote(path) if "%" in path else path)
        scope["raw_path"] = self.root_path.encode("ascii") + url.path
        scope["query_string"] = url.query or b""
        before = self.cycle
        keep_alive = version != "1.0" and parser.should_keep_alive()
        exchange = Exchange(cast("Scope", scope), self._terms(keep_alive=keep_alive))
        self.cycle = cast("RequestResponseCycle", exchange)
        app = self._app_for(scope)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, app))

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        exchange = self._exchange
        if exchange is not None and not exchange.response_complete and not self._offers_upgrade():
            exchange.take_body(body)

    def on_message_complete(self) -> None:
        """A body is complete."""
        exchange = self._exchange
        if exchange is not None and not self._offers_upgrade():
            exchange.more_body = False
            exchange.message_event.set()

    def on_response_complete(self) -> None:
        """An answer has been written: the connection waits for the next request, however long."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if (exchange := self._exchange) is not None and exchange.more_body:
            # Refused before its body was here. The rest is read and dropped: closed at once, the connection
            # would be reset under the answer.
            self.loop.call_later(_REST_OF_BODY_S, self._end_unless_read, exchange)
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        self._received = data
        super().data_received(data)
        self._received = b""

    def _offers_upgrade(self) -> bool:
        """Whether the request offers to go on in another protocol, a websocket among them."""
        return bool(self.parser.should_upgrade() and self._get_upgrade())

    def _unsupported_upgrade_warning(self) -> None:
        """Uvicorn calls it for an offer that it does not take up: the request goes on in HTTP/1.1."""
        upgrade = sys.exception()
        if not isinstance(upgrade, httptools.HttpParserUpgrade) or not self._offers_upgrade():
            return
        head = without_offer(self.scope["method"], self.url, self.headers)
        rest = self._received[upgrade.args[0] :]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(head + rest)

    def _end_unless_read(self, exchange: Exchange) -> None:
        if exchange.more_body and not self.transport.is_closing():
            self.transport.close()

    @property
    def _exchange(self) -> Exchange | None:
        """The last request whose head has come. To uvicorn it is a cycle."""
        return cast("Exchange | None", self.cycle)

    def _terms(self, *, keep_alive: bool) -> ExchangeTerms:
        return ExchangeTerms(
            transport=self.transport,
            flow=self.flow,
            headers=self.server_state.default_headers,
            keep_alive=keep_alive,
            expects_continue=self.expect_100_continue,
            on_answered=self.on_response_complete,
            peer_is_client=self.peer_is_client,
        )

    def _app_for(self, scope: Any) -> Any:
        if self.ingress is None:
            return self.app
        root, path = scope["root_path"], scope["path"]
        prefix = self.ingress.prefix_of(path[len(root) :])
        if prefix is None:
            return self.app
        scope["root_path"] = root + prefix
        scope["extensions"] = {EXTENSION: self.cycle}
        return self._gateway


def without_offer(method: str, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """A request's head without its offer to go on in another protocol."""
    lines = [b"%b %b HTTP/1.1" % (method.encode("ascii"), url)]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            kept = b", ".join(option for option in options if option.lower() not in _OF_OFFERS)
            lines.append(b"connection: %b" % kept)
        elif name not in _OF_OFFERS:
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def serve_front_end(gateway: ASGIApp) -> None:
    """Have the server that Serve starts in this process serve the gateway by such connections."""
    serve_connections_with(partial(FrontEndConnection, gateway))
