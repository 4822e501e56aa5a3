"""The address of the application itself, where no front end takes its requests: `proxy_location: Disabled`.

Gateways of a node share the address, and a successor listens before its predecessor ends. So that nobody
notices when one ends, it

1. lets the kernel drop attempts to connect to it: they are repeated, and then meet another one;
2. stops to listen once those are accepted that were half-way;
3. answers each connection once more, and says that it ends with that answer;
4. ends connections that have been idle for some seconds, and waits for open answers.

What a front end would do is done here: idle connections end, there are only so many, a head that does not
come is answered, and `/-/healthz` and `/-/routes` are there.
"""

import asyncio
import json
import socket
from functools import partial
from typing import Any

import uvicorn
from ray.serve.config import HTTPOptions

from serve_app.access import most_connections
from serve_app.engines.engine import ASGIApp, Receive, Scope, Send
from serve_app.errors import Outcome, SettingsError
from serve_app.serving.gateway.answer.responses import RequestRefused, send_json
from serve_app.serving.gateway.front.connection import FrontEndConnection
from serve_app.serving.gateway.front.exchange import ExchangeTerms
from serve_app.serving.gateway.front.ingress import OF_SERVE, prefix_among
from serve_app.serving.http_server import HttpServer
from serve_app.serving.listening import shared_socket, take_no_new_connections

# Connections that wait to be accepted, as the kernel allows by default.
_BACKLOG = 4096
# How often idle connections are looked for.
_LOOK_S = 1.0
# A handshake that is half-way takes as long as its way to the client and back. It is less than the second
# after which a dropped attempt is repeated.
_HALF_WAY_S = 0.5
# Of a gateway that ends: who has not asked for so long will hardly ask in the very moment of the close.
_LAST_IDLE_S = 2.0
_POLL_S = 0.1
_LATE_HEAD = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_RETRY_AFTER_S = 1.0


class ClientConnection(FrontEndConnection):
    """A connection from a client, with nothing in between.

    Args:
        gateway: serves what is asked for under the prefix.
        terms: of all connections of its port.
    """

    peer_is_client = True

    def __init__(self, gateway: ASGIApp, terms: "PortTerms", *args: Any, **keywords: Any) -> None:
        super().__init__(gateway, *args, **keywords)
        self.ingress = terms.ingress
        self._port_terms = terms
        self._is_one_too_many = False
        self._moved_at = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A connection has been opened."""
        super().connection_made(transport)
        there, most = len(self.connections), self._port_terms.most
        self._is_one_too_many = there > most
        if there > most + _BACKLOG:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        self._moved_at = self.loop.time()
        super().data_received(data)

    def on_response_complete(self) -> None:
        """An answer has been written; `OwnPort` ends a connection whose next request does not come."""
        self._moved_at = self.loop.time()
        super().on_response_complete()

    def is_idle(self, since: float) -> bool:
        """Whether nothing has gone on here since a time of the loop's clock, and no head is under way."""
        between = self.cycle is not None and self.cycle.response_complete
        return between and not self.head_has_begun and self._moved_at < since

    def _terms(self, *, keep_alive: bool) -> ExchangeTerms:
        return super()._terms(keep_alive=keep_alive and not self._port_terms.ends)

    def _app_for(self, scope: Any) -> Any:
        return _one_too_many if self._is_one_too_many else super()._app_for(scope)

    def _give_up(self) -> None:
        exchange = self._exchange
        if exchange is not None and not exchange.response_complete:
            # What was asked before has its whole answer, and the connection ends with it.
            exchange.keep_alive = False
            return
        if self.head_has_begun and not self.transport.is_closing():
            self.transport.write(_LATE_HEAD)
        super()._give_up()


async def _one_too_many(_: Scope, __: Receive, send: Send) -> None:
    """An ASGI app that refuses."""
    message = "This gateway has as many connections as it may have: try again, or use fewer connections."
    refused = RequestRefused(
        Outcome.REJECTED_QUEUE_FULL,
        message,
        code="too_many_connections",
        status=503,
        retry_after_s=_RETRY_AFTER_S,
    )
    await send_json(send, refused.status, refused.body(), [(b"connection", b"close"), *refused.headers()])


class PortTerms:
    """What holds for all connections of a port.

    Args:
        prefix: of the gateway's paths, without a slash at the end; empty for all.

    Attributes:
        most: connections that may be open at a time. Some more are told so, and no others let in.
        ends: each connection ends with its next answer.
    """

    def __init__(self, prefix: str) -> None:
        self.ingress = OwnIngress(prefix)
        self.most = most_connections()
        self.ends = False


class OwnIngress:
    """Which requests are for the gateway, on a port of its own.

    Args:
        prefix: of its paths, without a slash at the end.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def prefix_of(self, path: str) -> str | None:
        """The prefix; None when this path is for `FrontPages`."""
        return prefix_among(self._prefix, path)


class FrontPages:
    """What a front end of Serve answers by itself, as an ASGI app.

    Args:
        route: the prefix of the application, as Serve writes it.
        application: its name.
    """

    def __init__(self, route: str, application: str) -> None:
        self._pages = {
            OF_SERVE + "healthz": (200, b"text/plain", b"success"),
            OF_SERVE + "routes": (200, b"application/json", json.dumps({route: application}).encode()),
        }

    async def __call__(self, scope: Scope, _: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"].removeprefix(scope["root_path"])
        missing = f"Path {path!r} not found. See {OF_SERVE}routes for the paths that are."
        status, kind, body = self._pages.get(path, (404, b"text/plain", missing.encode()))
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class OwnPort:
    """A gateway's server on the application's address.

    Args:
        gateway: what it serves.
        options: of Serve: address, certificates, how long idle connections stay.
        route: the prefix of the application, as Serve writes it: `/` for all paths.
        application: its name.

    Raises:
        SettingsError: they ask for what only a front end does.
    """

    def __init__(self, gateway: ASGIApp, options: HTTPOptions, route: str, application: str) -> None:
        if options.request_timeout_s:
            raise SettingsError(
                f"http_options.request_timeout_s {options.request_timeout_s} needs a front end: set "
                "proxy_location to HeadOnly, or leave the limit to the queue's timeouts"
            )
        self._options = options
        self._terms = PortTerms(route.rstrip("/"))
        config = uvicorn.Config(
            FrontPages(route, application),
            http=partial(ClientConnection, gateway, self._terms),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            log_level=None,
            proxy_headers=False,
            server_header=False,
            root_path=options.root_path,
            timeout_keep_alive=options.keep_alive_timeout_s,
            backlog=_BACKLOG,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile_password=options.ssl_keyfile_password,
            ssl_ca_certs=options.ssl_ca_certs,
        )
        self._server = HttpServer("the gateway", config)
        self._socket: socket.socket | None = None
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"OwnPort({self._options.host}:{self._options.port}, connections={self._server.connections})"

    async def start(self) -> None:
        """Take requests.

        Raises:
            PortError: the address is not available.
        """
        options = self._options
        self._socket = shared_socket(options.host or "127.0.0.1", options.port, _BACKLOG)
        await self._server.start(self._socket)
        self._looking = asyncio.create_task(self._look_after(), name="own-port")

    def check_health(self) -> None:
        """Raise `ServerEndedError` when no requests are taken."""
        self._server.check_health()

    async def stop(self, grace_s: float) -> None:
        """End so that no client notices, see above; answers that are open after `grace_s` seconds are cut."""
        if self._socket is None or self._looking is None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        self._terms.ends = True
        if take_no_new_connections(self._socket):
            await asyncio.sleep(min(_HALF_WAY_S, grace_s))
        self._server.stop_listening()
        while self._server.connections and loop.time() < deadline:  # noqa: ASYNC110 - uvicorn has no event
            await asyncio.sleep(_POLL_S)
        self._looking.cancel()
        await self._server.stop(max(0.0, deadline - loop.time()))

    async def _look_after(self) -> None:
        """Every second: date the answers, and end connections whose next request does not come.

        One that is due is ended a look later: a process that was held up sees the time before it sees a
        request that has come meanwhile.
        """
        loop = asyncio.get_running_loop()
        due: set[ClientConnection] = set()
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._server.renew_date()
            idle_s = _LAST_IDLE_S if self._terms.ends else self._options.keep_alive_timeout_s
            since = loop.time() - idle_s
            idle = {
                each
                for each in self._server.open_connections()
                if isinstance(each, ClientConnection) and each.is_idle(since)
            }
            for each in idle & due:
                each.transport.close()
            due = idle - due
