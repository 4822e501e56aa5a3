"""Headers: requests' options, headers forwarded to replicas, and headers returned to clients."""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from serve_app.core.commands import Dispatch
from serve_app.errors import Outcome
from serve_app.request import MAX_TARGET_S, LatencyTarget, PriorityClass
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.gateway.answer.responses import (
    RATE_LIMIT_HEADERS,
    RequestRejected,
    header_text,
    rate_limit_headers,
)
from serve_app.serving.gateway.answer.waiting import QueueForm
from serve_app.serving.gateway.upstream.response import HeaderList

RECEIPT_HEADER = b"x-ewsjf-receipt"
"""Requests the receipt of the request; also the name of the header that returns it."""

QUEUE_HEADER = b"x-ewsjf-queue"
"""Subscribes to queue updates while the request waits; see `answer.waiting.QueueUpdates`."""

SERVED_MODEL_HEADER = b"x-served-model"
"""Names the model that answered a request to a route."""

MAX_REQUEST_ID_CHARACTERS = 128
MAX_QUEUE_TIMEOUT_S = 86_400.0

_UNFIT_FOR_ID = re.compile(rb"[^A-Za-z0-9._:/@+=-]")

# Hop-by-hop headers: they apply to one connection, not to the message (RFC 9110, 7.6.1).
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
# Only these client headers are for engines. Others identify the client, or would steer an engine past the
# scheduler (`x-data-parallel-rank`). Trace headers are the client's, or name the gateway's span.
_FORWARDED_TRACED = frozenset({b"accept", b"content-type", b"user-agent"})
_FORWARDED = _FORWARDED_TRACED | {b"traceparent", b"tracestate"}
# The server in front writes its own date and server, and the length is recomputed with the body.
_NOT_RETURNED = _HOP_BY_HOP | {
    *(b"content-length", b"date", b"server", b"x-request-id"),
    # An engine's limits are those of the gateway's own key there.
    *(name.encode() for name in RATE_LIMIT_HEADERS),
    # vLLM allows every origin by default; here `gateway.cors` decides.
    *(b"access-control-allow-origin", b"access-control-allow-credentials", b"access-control-expose-headers"),
}

# Marks a request that bypassed scheduling while only a share of the traffic is scheduled.
_BYPASSED = b"x-scheduled: no\r\n"
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")

_ORDINARY_CONNECTION = frozenset({b"", b"keep-alive", b"close"})

# OpenAI's service tiers as priority classes; None states no class.
_TIER_CLASS: dict[str, PriorityClass | None] = {
    "auto": None,
    # Anthropic's tier without priority capacity.
    "standard_only": PriorityClass.DEFAULT,
    "default": PriorityClass.DEFAULT,
    "scale": PriorityClass.DEFAULT,
    "priority": PriorityClass.INTERACTIVE,
    "flex": PriorityClass.BATCH,
}


def request_id(given: bytes | None, fallback: str) -> str:
    """Return the client's request id with invalid characters replaced, or `fallback` if it sent none."""
    if not given:
        return fallback
    return _UNFIT_FOR_ID.sub(b"_", given[:MAX_REQUEST_ID_CHARACTERS]).decode("ascii")


def requested_class(
    header: bytes | None, service_tier: str | None, priority: int | None
) -> tuple[PriorityClass, str] | None:
    """Return the requested class and its source, from the first source that states one; None if none does.

    Args:
        header: value of `x-priority`.
        service_tier: OpenAI's field of the body; `auto` states no class.
        priority: vLLM's field of the body; 0, its default, states no class.

    Raises:
        RequestRejected: a value is not a class.
    """
    if header is not None:
        return _class_of_header(header), "x-priority"
    tier_class = None if service_tier is None else _class_of_tier(service_tier)
    if tier_class is not None:
        return tier_class, "service_tier"
    if priority:
        # Lower is sooner, but each client uses its own scale, so only the sign is meaningful.
        return PriorityClass.INTERACTIVE if priority < 0 else PriorityClass.BATCH, "priority"
    return None


def _class_of_header(value: bytes) -> PriorityClass:
    asked = header_text(value)
    try:
        return PriorityClass(asked.strip().lower())
    except ValueError:
        raise _bad_value("x-priority", asked, "interactive, default or batch") from None


def _class_of_tier(service_tier: str) -> PriorityClass | None:
    if service_tier not in _TIER_CLASS:
        raise _bad_value("service_tier", service_tier, ", ".join(_TIER_CLASS))
    return _TIER_CLASS[service_tier]


class QueueOptions(NamedTuple):
    """Options of a request for its time in the queue.

    Attributes:
        no_wait: reject it instead of queueing it (`x-queue: no-wait`).
        timeout_s: queue timeout (`x-queue-timeout-s`); None for the default.
        form: format of queue updates (`x-ewsjf-queue`); None if the client does not subscribe.
    """

    no_wait: bool = False
    timeout_s: float | None = None
    form: QueueForm | None = None


_DEFAULT_OPTIONS = QueueOptions()
_QUEUE_HEADERS = frozenset({b"x-queue", b"x-queue-timeout-s", QUEUE_HEADER})


def queue_options(headers: Mapping[bytes, bytes]) -> QueueOptions:
    """Return the queue options of a request.

    Raises:
        RequestRejected: a header has an invalid value.
    """
    if _QUEUE_HEADERS.isdisjoint(headers):
        return _DEFAULT_OPTIONS
    no_wait, timeout_s, form = (
        headers.get(name) for name in (b"x-queue", b"x-queue-timeout-s", QUEUE_HEADER)
    )
    if no_wait is not None and no_wait.strip().lower() != b"no-wait":
        raise _bad_value("x-queue", header_text(no_wait), "no-wait, or omit the header")
    return QueueOptions(
        no_wait=no_wait is not None,
        timeout_s=None if timeout_s is None else _queue_timeout_s(timeout_s),
        form=None if form is None else _queue_form(header_text(form)),
    )


def _queue_timeout_s(header: bytes) -> float:
    try:
        value = float(header)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_QUEUE_TIMEOUT_S:
        raise _bad_value("x-queue-timeout-s", header_text(header), "a number of seconds above 0, up to 86400")
    return value


_TARGET_HEADERS = frozenset({b"x-slo", b"x-slo-ttft-ms", b"x-slo-tpot-ms"})


def latency_target(headers: Mapping[bytes, bytes]) -> LatencyTarget | None:
    """Return the latency target that a request states; None if it states none.

    Raises:
        RequestRejected: a header has an invalid value.
    """
    if _TARGET_HEADERS.isdisjoint(headers):
        return None
    asked = headers.get(b"x-slo")
    if asked is not None and asked.strip().lower() != b"refuse":
        raise _bad_value("x-slo", header_text(asked), "refuse, or omit the header")
    return LatencyTarget(
        ttft_s=_target_s(headers, "x-slo-ttft-ms"),
        tpot_s=_target_s(headers, "x-slo-tpot-ms"),
        refuse=asked is not None,
    )


def _target_s(headers: Mapping[bytes, bytes], name: str) -> float | None:
    header = headers.get(name.encode())
    if header is None:
        return None
    if (seconds := milliseconds(header)) is None:
        raise _bad_value(name, header_text(header), "a number of milliseconds above 0, up to 86400000")
    return seconds


def milliseconds(header: bytes) -> float | None:
    """Return a latency limit in milliseconds as seconds; None if it is no number, or out of range."""
    try:
        seconds = float(header) / 1e3
    except ValueError:
        return None
    return seconds if 0 < seconds <= MAX_TARGET_S else None


def _queue_form(asked: str) -> QueueForm:
    try:
        return QueueForm(asked.strip().lower())
    except ValueError:
        accepted = "comments or events, or omit the header"
        raise _bad_value(QUEUE_HEADER.decode(), asked, accepted) from None


def reject_encoded_body(encoding: bytes | None) -> None:
    """Raise `RequestRejected` for a compressed body, which the gateway cannot parse."""
    if encoding and encoding.strip().lower() != b"identity":
        raise _bad_value("content-encoding", header_text(encoding), "no compression of request bodies")


def content_type(raw: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the content type of a body; empty if there is none.

    Raises:
        RequestRejected: there are two, and the engine might use the other one.
    """
    given = [value for name, value in raw if name == b"content-type"]
    if len(given) > 1:
        raise RequestRejected(Outcome.REJECTED_INVALID, "the header content-type occurs twice: send it once")
    return given[0] if given else b""


def forwarded(
    raw: Iterable[tuple[bytes, bytes]], headers: Mapping[bytes, bytes], *, is_traced: bool = False
) -> bytes:
    """Return the header lines that are forwarded to a replica, each with its line end.

    Args:
        is_traced: omit the client's trace headers, because each attempt adds the gateway's own span.

    Raises:
        RequestRejected: a header contains a line break.
    """
    passed = _FORWARDED_TRACED if is_traced else _FORWARDED
    connection = headers.get(b"connection", b"").lower()
    if connection not in _ORDINARY_CONNECTION:
        passed = passed - {token.strip() for token in connection.split(b",")}
    lines = [name + b": " + value + b"\r\n" for name, value in raw if name in passed]
    block = b"".join(lines)
    if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines):
        raise RequestRejected(Outcome.REJECTED_INVALID, "a request header contains a line break: remove it")
    return block


def upstream_head(
    method: str, path: str, own_id: str, forwarded: bytes, address: ReplicaAddress, body_bytes: int
) -> bytes:
    """Return request line and headers for a replica, including the empty line.

    Args:
        own_id: the gateway's id of the request, because engines name requests by it and clients may repeat
            theirs.
    """
    lines = (
        f"{method} {address.path}{path} HTTP/1.1\r\n{_host_and_credentials(address)}"
        f"x-request-id: {own_id}\r\ncontent-length: {body_bytes}\r\n"
    )
    return lines.encode("latin-1") + forwarded + b"\r\n"


def engine_head(address: ReplicaAddress, path: str) -> bytes:
    """Return request line and headers of a GET that the gateway sends itself."""
    lines = f"GET {address.path}{path} HTTP/1.1\r\n{_host_and_credentials(address)}\r\n"
    return lines.encode("latin-1")


def _host_and_credentials(address: ReplicaAddress) -> str:
    host = address.server_name or address.host
    host = f"[{host}]" if ":" in host else host
    credentials = f"x-replica-token: {address.token}\r\n" if address.token else ""
    if address.api_key:
        credentials = f"authorization: Bearer {address.api_key}\r\n"
    return f"host: {host}:{address.port}\r\n{credentials}"


def response_headers(raw: HeaderList) -> HeaderList:
    """Return the headers of a replica's answer that are passed to the client."""
    return [(name, value) for name, value in raw if name not in _NOT_RETURNED]


def dispatch_lines(dispatch: Dispatch) -> bytes:
    """Return the header lines that describe the dispatch of a request."""
    limits = dispatch.rate_limits
    return b"x-queue-wait-ms: %.1f\r\n%bx-estimated-tokens: %d\r\n%b%b" % (
        dispatch.queue_wait_s * 1000,
        _placement_lines(dispatch.pool, dispatch.replica_id, dispatch.length_queue),
        dispatch.estimated_tokens,
        b"" if limits is None else header_lines(rate_limit_headers(limits)),
        _BYPASSED if dispatch.passed else b"",
    )


# There are few replicas and length queues.
@lru_cache(maxsize=1024)
def _placement_lines(pool: str, replica_id: str, length_queue: str) -> bytes:
    named = {b"x-pool": pool, b"x-replica": replica_id, b"x-length-queue": length_queue}
    return header_lines((name, value.encode("latin-1", "replace")) for name, value in named.items())


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return headers as lines, with control characters replaced."""
    return b"".join([b"%b: %b\r\n" % (name, _CONTROL.sub(b"?", value)) for name, value in headers])


def _bad_value(name: str, value: str, accepted: str) -> RequestRejected:
    shown = value if len(value) <= 64 else value[:64] + "..."
    return RequestRejected(
        Outcome.REJECTED_INVALID, f"{name}: {shown!r} is not valid; accepted: {accepted}", param=name
    )
