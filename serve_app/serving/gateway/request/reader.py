"""Takes a request in: reads its body, checks it, and turns it into an order."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.engines.engine import Receive, Scope, Send
from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import Submission
from serve_app.serving.gateway.answer.disconnect import ClientGone
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.auth import Caller, Keyring
from serve_app.serving.gateway.forward import ForwardJob
from serve_app.serving.gateway.request import headers as heads
from serve_app.serving.gateway.request.parse import PARSERS, Parsed
from serve_app.serving.gateway.request.prefix import NO_OPENING, PrefixSettings, engine_salt, prefix_hashes
from serve_app.serving.gateway.request.splice import (
    NO_PRIORITY,
    append_fields,
    priority_field,
    salt_field,
    usage_field,
)
from serve_app.serving.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request of which only the head has been looked at.

    Attributes:
        request_id: the gateway's own, unique among all gateways.
        client_request_id: the client's, or the gateway's when it sent none.
        arrived_at: on the event loop's clock.
    """

    scope: Scope
    receive: Receive
    send: Send
    path: str
    headers: Mapping[bytes, bytes]
    request_id: str
    client_request_id: str
    arrived_at: float


class RequestReader:
    """What a gateway checks before it bothers a scheduler."""

    def __init__(self, settings: GatewaySettings, gateway_id: str) -> None:
        self._settings = settings
        self._keyring = Keyring(settings.keys)
        self._models = {model.name for model in settings.models}
        self._gateway_id = gateway_id
        self._numbers = itertools.count(1)

    def arrival(self, scope: Scope, receive: Receive, send: Send, path: str, now: float) -> IncomingRequest:
        """Name a request that has just come in, and note when."""
        headers = dict(scope["headers"])
        own = f"{self._gateway_id}-{next(self._numbers)}"
        return IncomingRequest(
            scope=scope,
            receive=receive,
            send=send,
            path=path,
            headers=headers,
            request_id=own,
            client_request_id=heads.request_id(headers.get(b"x-request-id"), own),
            arrived_at=now,
        )

    def authenticate(self, arrival: IncomingRequest) -> Caller:
        """Who is calling.

        Raises:
            RequestRefused: nobody who may.
        """
        return self._keyring.caller(arrival.headers.get(b"authorization"))

    async def body(self, arrival: IncomingRequest) -> bytes:
        """The whole body.

        Raises:
            RequestRefused: it is longer than allowed, or compressed.
            ClientGone: the client left before it was complete.
        """
        limit = self._settings.max_body_bytes
        heads.refuse_encoded_body(arrival.headers.get(b"content-encoding"))
        stated = arrival.headers.get(b"content-length", b"0")
        if stated.isdigit() and int(stated) > limit:
            raise _too_large(limit)
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await arrival.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client left before its request was complete")
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def order(self, arrival: IncomingRequest) -> ForwardJob:
        """Read and check a request for a scheduled endpoint.

        Raises:
            RequestRefused: it cannot be served as it is.
            ClientGone: the client left before it was complete.
        """
        caller = self.authenticate(arrival)
        body = await self.body(arrival)
        parsed = PARSERS[arrival.path].parse(body)
        self.check_model(parsed.model)
        settings = self._settings.prefix
        submission = _submission(arrival, caller, parsed, settings)
        fields = _fields(parsed, body)
        if settings.per_tenant and parsed.opening is not NO_OPENING:
            fields.append(salt_field(engine_salt(submission.tenant, parsed.opening.salt)))
        return ForwardJob(
            submission=submission,
            head=self.head(arrival),
            body=append_fields(body, fields),
            hide_usage=parsed.asks_usage and not parsed.shows_usage,
            arrived_at=arrival.arrived_at,
        )

    def head(self, arrival: IncomingRequest) -> heads.RequestHead:
        """The head of the request for a replica."""
        return heads.RequestHead(
            path=arrival.path,
            client_request_id=arrival.client_request_id,
            forwarded=heads.forwarded(arrival.scope["headers"], arrival.headers),
        )

    def check_model(self, model: str) -> None:
        """Refuse a model that is not served.

        Raises:
            RequestRefused: it is not.
        """
        if model not in self._models:
            raise RequestRefused(
                Outcome.REJECTED_UNKNOWN_MODEL,
                f"the model {model[:100]!r} is not served here; models: {', '.join(sorted(self._models))}",
                param="model",
            )


def _fields(parsed: Parsed, body: bytes) -> list[bytes]:
    """Fields that the engine must get and the client did not write."""
    fields: list[bytes] = []
    if parsed.stream and parsed.asks_usage and not parsed.shows_usage:
        fields.append(usage_field(body, has_stream_options=parsed.has_stream_options))
    if parsed.priority:
        # It has been read as the request's class. An engine refuses it unless it schedules by priority, and
        # there it would pass the requests of others, so no client's own number reaches one.
        fields.append(priority_field(NO_PRIORITY))
    return fields


def _submission(
    arrival: IncomingRequest, caller: Caller, parsed: Parsed, prefix: PrefixSettings
) -> Submission:
    headers = arrival.headers
    tenant = caller.tenant(headers.get(b"x-tenant"), parsed.user)
    wish = heads.ClassWish(
        header=headers.get(b"x-priority"), service_tier=parsed.service_tier, priority=parsed.priority
    )
    return Submission(
        request_id=arrival.request_id,
        model=parsed.model,
        shape=parsed.shape,
        tenant=tenant,
        priority=heads.priority_class(wish, caller.default_class, caller.check_class),
        max_output_tokens=parsed.max_output_tokens,
        choices=parsed.choices,
        queue_timeout_s=heads.queue_timeout_s(headers.get(b"x-queue-timeout-s")),
        streamed=parsed.stream,
        no_wait=heads.no_wait(headers.get(b"x-queue")),
        prefix=_prefix(parsed, tenant, prefix),
    )


def _prefix(parsed: Parsed, tenant: str, settings: PrefixSettings) -> tuple[int, ...]:
    if not settings.enabled:
        return ()
    apart = tenant if settings.per_tenant else ""
    return prefix_hashes(parsed.opening, model=parsed.model, tenant=apart)


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused(
        Outcome.REJECTED_BODY_TOO_LARGE,
        f"the body is longer than {limit} bytes: send less, or raise gateway.max_body_bytes",
    )
