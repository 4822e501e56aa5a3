"""Headers, both ways: what a client may ask for, what goes on to the replica, what is returned."""

import math
import re
from collections.abc import Iterable, Mapping

from serve_app.core.commands import Dispatch
from serve_app.errors import Outcome
from serve_app.request import PriorityClass
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.gateway.answer.responses import (
    RATE_LIMIT_HEADERS,
    HeaderList,
    RequestRefused,
    rate_limit_headers,
)
from serve_app.serving.gateway.answer.waiting import QueueForm
from serve_app.serving.gateway.request.incoming import IncomingRequest

RECEIPT_HEADER = b"x-ewsjf-receipt"
"""Asks for where the time of the request went, and tells it."""

QUEUE_HEADER = b"x-ewsjf-queue"
"""Asks to be told of the queue while the request waits; see `answer.waiting.queue_updates`."""

MAX_REQUEST_ID_CHARACTERS = 128
MAX_QUEUE_TIMEOUT_S = 86_400.0

_UNFIT_FOR_ID = re.compile(rb"[^A-Za-z0-9._:/@+=-]")

# They speak of one connection, not of the message (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Of what a client sends, only this is for engines. Whatever else it sends says who it is, or would steer an
# engine past the scheduler (`x-data-parallel-rank`). Traces go on through the engine: the client's own, or
# with the gateway's span in its place.
_FORWARDED_TRACED = frozenset({b"accept", b"content-type", b"user-agent"})
_FORWARDED = _FORWARDED_TRACED | {b"traceparent", b"tracestate"}
# The server in front writes its own date and server; the length is written anew with the body.
_NOT_RETURNED = _HOP_BY_HOP | {
    *(b"content-length", b"date", b"server", b"x-request-id"),
    # An engine's limits are those of the gateway's own key there.
    *(name.encode() for name in RATE_LIMIT_HEADERS),
    # vLLM lets every page in unless it is told otherwise; here `gateway.cors` decides.
    *(b"access-control-allow-origin", b"access-control-allow-credentials", b"access-control-expose-headers"),
}

# Of a request that was not scheduled, while only a part of them is.
_PASSED = ((b"x-scheduled", b"no"),)

_ORDINARY_CONNECTION = frozenset({b"", b"keep-alive", b"close"})

# OpenAI's tiers, as far as they say how urgent a request is.
_TIER_CLASS: dict[str, PriorityClass | None] = {
    "auto": None,
    # Anthropic's word for no use of capacity that was bought for priority.
    "standard_only": PriorityClass.DEFAULT,
    "default": PriorityClass.DEFAULT,
    "scale": PriorityClass.DEFAULT,
    "priority": PriorityClass.INTERACTIVE,
    "flex": PriorityClass.BATCH,
}


def request_id(given: bytes | None, fallback: str) -> str:
    """The client's own request id with unfit characters replaced, or the gateway's when it gave none."""
    if not given:
        return fallback
    return _UNFIT_FOR_ID.sub(b"_", given[:MAX_REQUEST_ID_CHARACTERS]).decode("ascii")


def requested_class(
    header: bytes | None, service_tier: str | None, priority: int | None
) -> tuple[PriorityClass, str] | None:
    """The class that a request asks for, and the place where it does; None when it asks for none.

    Args:
        header: value of `x-priority`; the first of the three places that says something counts.
        service_tier: OpenAI's field of the body; `auto` says nothing.
        priority: vLLM's field of the body; 0, which is its default, says nothing.

    Raises:
        RequestRefused: a value is no class.
    """
    if header is not None:
        return _class_of_header(header), "x-priority"
    tier_class = None if service_tier is None else _class_of_tier(service_tier)
    if tier_class is not None:
        return tier_class, "service_tier"
    if priority:
        # Lower is sooner, on a scale that each client makes up: a number tells only its side of 0.
        return PriorityClass.INTERACTIVE if priority < 0 else PriorityClass.BATCH, "priority"
    return None


def _class_of_header(value: bytes) -> PriorityClass:
    asked = value.decode("latin-1")
    try:
        return PriorityClass(asked.strip().lower())
    except ValueError:
        raise _bad_value("x-priority", asked, "interactive, default or batch") from None


def _class_of_tier(service_tier: str) -> PriorityClass | None:
    if service_tier not in _TIER_CLASS:
        raise _bad_value("service_tier", service_tier, ", ".join(_TIER_CLASS))
    return _TIER_CLASS[service_tier]


def queue_timeout_s(header: bytes | None) -> float | None:
    """Return how long a request may wait in the queue (`x-queue-timeout-s`).

    Raises:
        RequestRefused: it is not a positive number of seconds.
    """
    if header is None:
        return None
    try:
        value = float(header)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_QUEUE_TIMEOUT_S:
        raise _bad_value(
            "x-queue-timeout-s", header.decode("latin-1"), "a number of seconds above 0, up to 86400"
        )
    return value


def no_wait(header: bytes | None) -> bool:
    """Return whether a request is to be refused rather than queued (`x-queue: no-wait`).

    Raises:
        RequestRefused: the header says something else.
    """
    if header is None:
        return False
    if header.strip().lower() != b"no-wait":
        raise _bad_value("x-queue", header.decode("latin-1"), "no-wait, or leave the header out")
    return True


def queue_form(header: bytes | None) -> QueueForm | None:
    """Return the format of queue updates (`x-ewsjf-queue`); None where the client does not subscribe.

    Raises:
        RequestRefused: the header says something else.
    """
    if header is None:
        return None
    asked = header.decode("latin-1")
    try:
        return QueueForm(asked.strip().lower())
    except ValueError:
        accepted = "comments or events, or leave the header out"
        raise _bad_value(QUEUE_HEADER.decode(), asked, accepted) from None


def refuse_encoded_body(encoding: bytes | None) -> None:
    """Refuse a compressed body, which the gateway could not read.

    Raises:
        RequestRefused: `content-encoding` is anything but identity.
    """
    if encoding and encoding.strip().lower() != b"identity":
        raise _bad_value("content-encoding", encoding.decode("latin-1"), "no compression of request bodies")


def content_type(raw: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The content type of a body that is read by it; empty where there is none.

    Raises:
        RequestRefused: there are two, and an engine might read the body by the other one.
    """
    given = [value for name, value in raw if name == b"content-type"]
    if len(given) > 1:
        raise RequestRefused(
            Outcome.REJECTED_INVALID, "the request has the header content-type twice: send it once"
        )
    return given[0] if given else b""


def forwarded(
    raw: Iterable[tuple[bytes, bytes]], headers: Mapping[bytes, bytes], *, is_traced: bool = False
) -> bytes:
    """The lines of a client's headers that go on to the replica, each with its line end.

    Args:
        is_traced: each attempt to serve the request tells the replica of a span of its own.

    Raises:
        RequestRefused: a header contains a line break.
    """
    passed = _FORWARDED_TRACED if is_traced else _FORWARDED
    connection = headers.get(b"connection", b"").lower()
    if connection not in _ORDINARY_CONNECTION:
        passed = passed - {token.strip() for token in connection.split(b",")}
    lines = [name + b": " + value + b"\r\n" for name, value in raw if name in passed]
    block = b"".join(lines)
    if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines):
        raise RequestRefused(Outcome.REJECTED_INVALID, "a request header contains a line break: remove it")
    return block


def upstream_head(
    incoming: IncomingRequest, forwarded: bytes, address: ReplicaAddress, body_bytes: int
) -> bytes:
    """Request line and headers for a replica, with the empty line after them.

    The id is the gateway's own: an engine names its request by it, and clients may well use one twice.

    Args:
        forwarded: lines of the client's headers that go on, from `forwarded()`.
    """
    lines = (
        f"{incoming.method} {address.path}{incoming.path} HTTP/1.1\r\n{_host_and_credentials(address)}"
        f"x-request-id: {incoming.request_id}\r\ncontent-length: {body_bytes}\r\n"
    )
    return lines.encode("latin-1") + forwarded + b"\r\n"


def engine_head(address: ReplicaAddress, path: str) -> bytes:
    """Request line and headers of a GET of the gateway's own."""
    lines = f"GET {address.path}{path} HTTP/1.1\r\n{_host_and_credentials(address)}\r\n"
    return lines.encode("latin-1")


def _host_and_credentials(address: ReplicaAddress) -> str:
    host = address.server_name or address.host
    host = f"[{host}]" if ":" in host else host
    credentials = f"x-replica-token: {address.token}\r\n" if address.token else ""
    if address.api_key:
        credentials = f"authorization: Bearer {address.api_key}\r\n"
    return f"host: {host}:{address.port}\r\n{credentials}"


def returned(raw: HeaderList) -> HeaderList:
    """The headers of a replica's answer that go on to the client."""
    return [(name, value) for name, value in raw if name not in _NOT_RETURNED]


def describing(dispatch: Dispatch) -> HeaderList:
    """Return the headers that describe how a request was scheduled."""
    return [
        (b"x-queue-wait-ms", b"%.1f" % (dispatch.queue_wait_s * 1000)),
        (b"x-pool", dispatch.pool.encode("latin-1", "replace")),
        (b"x-replica", dispatch.replica_id.encode("latin-1", "replace")),
        (b"x-length-queue", dispatch.length_queue.encode("latin-1", "replace")),
        (b"x-estimated-tokens", b"%d" % dispatch.estimated_tokens),
        *rate_limit_headers(dispatch.rate_limits),
        *(_PASSED if dispatch.passed else ()),
    ]


def _bad_value(name: str, value: str, accepted: str) -> RequestRefused:
    shown = value if len(value) <= 64 else value[:64] + "..."
    return RequestRefused(
        Outcome.REJECTED_INVALID, f"{name}: {shown!r} is not valid; accepted: {accepted}", param=name
    )
