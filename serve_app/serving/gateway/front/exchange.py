"""One request on a connection, and its answer: uvicorn's cycle, with a shorter way for the gateway.

It serves any ASGI app. The gateway finds it in the scope's extensions, and then

- hears at once when the client goes, without a task that waits for it;
- writes the pieces of a stream without a coroutine for each, and hears when there is room again.

The head of an answer leaves with its first piece, in one segment.

HTTP/1.0 clients do not know chunks (RFC 9112, 6.1), so an answer of unknown length ends with its connection.
Some clients only call themselves 1.0: nginx does by default when it forwards, so holding a stream back until
its length is known would take the stream from everyone behind it.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from serve_app.engines.engine import ASGIApp, Message, Scope
from serve_app.serving.gateway.answer.responses import HeaderList

logger = logging.getLogger("ray.serve")

_UNFIT_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_UNFIT_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NO_BODY_STATUSES = frozenset({204, 304})
# Longer pieces are written beside their head, which costs less than to copy them.
_COPIED_BYTES = 64 * 1024
_FAULT = b"Internal Server Error"


@dataclass(frozen=True, slots=True)
class ExchangeTerms:
    """What a connection hands to each of its exchanges.

    Attributes:
        headers: of every answer, such as the date.
        keep_alive: the connection goes on after the answer, unless that says otherwise.
        expects_continue: the client sends its body once it is told to.
        on_answered: called when the answer is complete.
        peer_is_client: who has connected is the client itself.
    """

    transport: asyncio.Transport
    flow: FlowControl
    headers: HeaderList
    keep_alive: bool
    expects_continue: bool
    on_answered: Callable[[], None]
    peer_is_client: bool


class Exchange:
    """One request and its answer; made by the connection.

    Attributes:
        body: what has arrived of the request's body and was not taken.
        more_body: the body is not complete.
        disconnected: the client has gone.
        response_complete: the answer has been written.
        on_gone: called when the client goes before its answer is complete.
        on_room: called when the client has read, after `pass_on` has told of no room.
        peer_is_client: who has connected is the client itself, and no front end.
    """

    __slots__ = (
        "_chunked",
        "_ends_connection",
        "_head",
        "_left",
        "_method",
        "_old_client",
        "_terms",
        "_waits_for_continue",
        "body",
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "on_gone",
        "on_room",
        "peer_is_client",
        "response_complete",
        "response_started",
        "scope",
    )

    def __init__(self, scope: Scope, terms: ExchangeTerms) -> None:
        self.scope = scope
        self.body = bytearray()
        self.more_body = True
        self.message_event = asyncio.Event()
        self.keep_alive = terms.keep_alive
        self.peer_is_client = terms.peer_is_client
        self.disconnected = False
        self.response_started = False
        self.response_complete = False
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self._terms = terms
        self._waits_for_continue = terms.expects_continue
        self._method: str = scope["method"]
        self._old_client = scope["http_version"] == "1.0"
        self._head = b""
        self._chunked = False
        # Of the length that the answer has stated; None for an answer that has stated none.
        self._left: int | None = None
        self._ends_connection = False

    # What the gateway finds.

    def pass_on(self, piece: bytes) -> bool:
        """Write a piece of an answer that has begun; whether there is room for more.

        Pieces are written also when there is none: `on_room` tells when to go on.
        """
        if not self.disconnected:
            self._write(piece, ends=False)
        return not self._terms.flow.write_paused

    # What the connection tells.

    def client_gone(self) -> None:
        """The connection is over."""
        if self.response_complete:
            return
        self.disconnected = True
        if self.on_gone is not None:
            self.on_gone()

    def has_room(self) -> None:
        """The client has read what was written."""
        if self.on_room is not None:
            self.on_room()

    # ASGI.

    async def run_asgi(self, app: ASGIApp) -> None:
        """Have the app answer, and make up for what it leaves out."""
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            # The server ends.
            await self._fail()
        except Exception:
            logger.exception("event=front_fault path=%r", self.scope.get("path"))
            await self._fail()
        else:
            if not self.response_complete and not self.disconnected:
                logger.error("event=front_fault path=%r reason='no complete answer'", self.scope.get("path"))
                await self._fail()

    async def receive(self) -> Message:
        """The next piece of the body, or the client's end."""
        if self._waits_for_continue and not self._terms.transport.is_closing():
            self._terms.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._waits_for_continue = False
        if not self.disconnected and not self.response_complete:
            self._terms.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = self.body, bytearray()
        return {"type": "http.request", "body": bytes(body), "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Write a part of the answer.

        Raises:
            RuntimeError: the parts make up no answer.
        """
        flow = self._terms.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            if self.response_started:
                raise RuntimeError("an answer began twice")
            self.response_started = True
            self._waits_for_continue = False
            self._head = self._rendered(message["status"], message.get("headers", ()))
        elif not self.response_started or self.response_complete:
            raise RuntimeError(f"{message['type']} before an answer's begin, or after its end")
        else:
            self._write(message.get("body", b""), ends=not message.get("more_body", False))

    def take_body(self, piece: bytes) -> None:
        """More of the body has arrived."""
        self.body += piece
        if len(self.body) > HIGH_WATER_LIMIT:
            self._terms.flow.pause_reading()
        self.message_event.set()

    # How answers are written.

    def _rendered(self, status: int, headers: HeaderList) -> bytes:
        """The head, with what it says of the answer's end."""
        lines = [STATUS_LINE[status]]
        closes, stated = False, False
        for name, value in (*self._terms.headers, *headers):
            if _UNFIT_NAME.search(name) or _UNFIT_VALUE.search(value):
                raise RuntimeError(f"the header {name!r} cannot be written: it has control characters")
            name = name.lower()  # noqa: PLW2901 - the same name
            if name == b"content-length":
                self._left, stated = int(value), True
            elif name == b"transfer-encoding":
                continue  # said below
            elif name == b"connection" and b"close" in value.lower():
                closes = True
            lines += (name, b": ", value, b"\r\n")
        if not stated and self._method != "HEAD" and status not in _NO_BODY_STATUSES:
            if self._old_client:
                self._ends_connection = True
            else:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if closes:
            self.keep_alive = False
        elif not self.keep_alive or self._ends_connection:
            self.keep_alive = False
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _write(self, body: bytes, *, ends: bool) -> None:
        if self._method == "HEAD":
            body, self._left = b"", None
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (ends and self._left):
                raise RuntimeError(f"an answer has {-self._left} bytes more than its content-length states")
        write = self._terms.transport.write
        head, self._head = self._head, b""
        if self._chunked:
            body = b"%b%x\r\n%b\r\n" % (head, len(body), body) if body else head
            if ends:
                body += b"0\r\n\r\n"
        elif len(body) <= _COPIED_BYTES:
            body = head + body
        elif head:
            write(head)
        if body:
            write(body)
        if ends:
            self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self.on_gone = self.on_room = None
        self.message_event.set()
        if not self.keep_alive:
            self._terms.transport.close()
        self._terms.on_answered()

    async def _fail(self) -> None:
        if self.response_complete or self.disconnected:
            return
        if self.response_started:
            # Whatever came so far must not look complete.
            self._terms.transport.close()
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        length = (b"content-length", b"%d" % len(_FAULT))
        await self.send({"type": "http.response.start", "status": 500, "headers": [*headers, length]})
        await self.send({"type": "http.response.body", "body": _FAULT})
