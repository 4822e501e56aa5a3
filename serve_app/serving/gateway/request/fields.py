"""Fields of requests and answers: headers in both directions, and the parts of bodies that endpoints read.

- `queue_options`, `latency_target`, `forwarded`: options of requests, and headers forwarded to replicas.
- `dispatch_lines`, `response_headers`: headers returned to clients.
- `with_own_names`: headers of other gateways as synonyms of the gateway's own, which win if both are sent.
- `BodyFields` and others: the fields read from each endpoint's body; msgspec skips all others. A wrong type
  here would also be an error in the engine. All other checks are left to the engine. For duplicate keys the
  last value counts, as in the engines.

| synonym                                                              | own header          |
|----------------------------------------------------------------------|---------------------|
| `x-llm-d-inference-fairness-id`, `x-gateway-inference-fairness-id`    | `x-tenant`          |
| `x-llm-d-inference-ttl`, a duration such as `1500ms` or `1m30s`       | `x-queue-timeout-s` |
| `x-llm-d-slo-ttft-ms`                                                | `x-slo-ttft-ms`     |
| `x-llm-d-slo-tpot-ms`                                                | `x-slo-tpot-ms`     |

`x-llm-d-inference-objective` and `x-gateway-inference-objective` name an objective, which stands for several
own headers; see `ObjectiveSettings`.

The `x-llm-d` names are those of llm-d's router (pkg/epp/metadata/consts.go), the others those of the Gateway
API Inference Extension. Clients may send them for another gateway, so an invalid or forbidden value is
ignored and never an error.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec

from serve_app.core.commands import Dispatch
from serve_app.core.latency_targets import TargetLimits
from serve_app.core.settings_base import between, settings
from serve_app.errors import Outcome
from serve_app.request import MAX_TARGET_S, LatencyTarget, PriorityClass, RequestTimes
from serve_app.serving.api_keys import is_tenant_name
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.gateway.answer.responses import (
    RATE_LIMIT_HEADERS,
    RequestRejected,
    encode,
    header_text,
    rate_limit_headers,
)
from serve_app.serving.gateway.answer.stream import QueueForm
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.upstream import HeaderList

RECEIPT_HEADER = b"x-ewsjf-receipt"
"""Requests the receipt of the request; also the name of the header that returns it."""

QUEUE_HEADER = b"x-ewsjf-queue"
"""Subscribes to queue updates while the request waits; see `answer.stream.QueueUpdates`."""

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
    # vLLM allows every origin by default; here `gateway.router` decides.
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


def receipt_line(times: RequestTimes, dispatch: Dispatch) -> bytes:
    """Return the header line of the receipt for a client that sent `x-ewsjf-receipt: 1`."""
    return RECEIPT_HEADER + b": " + encode(_receipt(times, dispatch)) + b"\r\n"


def receipt_comment(times: RequestTimes, dispatch: Dispatch) -> bytes:
    """Return the receipt as a comment for the end of an event stream."""
    return b": " + RECEIPT_HEADER[2:] + b" " + encode(_receipt(times, dispatch)) + b"\n\n"


def _receipt(times: RequestTimes, dispatch: Dispatch) -> dict[str, Any]:
    """Return the completed stages under the names that the scheduler's receipts use, and the engine's own."""
    waited, engine = dispatch.waited, times.engine
    receipt: dict[str, Any] = {
        "wait_ms": round(dispatch.queue_wait_s * 1e3, 3),
        "causes_ms": {} if waited is None else {cause: ns / 1e6 for cause, ns in waited.causes.items()},
        "ahead": {} if waited is None else waited.ahead,
        "stages_ms": {name: round(s * 1e3, 3) for name, s in times.stages(dispatch.queue_wait_s)},
    }
    if engine is not None:
        named = {"queue": engine.queue_s, "prefill": engine.prefill_s, "generation": engine.generation_s}
        receipt["engine_ms"] = {name: round(s * 1e3, 3) for name, s in named.items() if s is not None}
    return receipt


def _bad_value(name: str, value: str, accepted: str) -> RequestRejected:
    shown = value if len(value) <= 64 else value[:64] + "..."
    return RequestRejected(
        Outcome.REJECTED_INVALID, f"{name}: {shown!r} is not valid; accepted: {accepted}", param=name
    )


_UNIT_S = {b"ns": 1e-9, b"us": 1e-6, "µs".encode(): 1e-6, b"ms": 1e-3, b"s": 1.0, b"m": 60.0, b"h": 3600.0}
# Go's `time.ParseDuration`, without signs.
_PART = re.compile(rb"(\d+\.?\d*|\.\d+)(ns|us|\xc2\xb5s|ms|s|m|h)")

_Translate = Callable[[bytes, Caller], bytes | None]


def _tenant(value: bytes, caller: Caller) -> bytes | None:
    return value if caller.may_act_for_tenants and is_tenant_name(header_text(value)) else None


def _timeout_s(value: bytes, _caller: Caller) -> bytes | None:
    parts = _PART.findall(value)
    if not parts or b"".join(number + unit for number, unit in parts) != value:
        return None
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    return b"%r" % seconds if 0 < seconds <= MAX_QUEUE_TIMEOUT_S else None


def _target(value: bytes, _caller: Caller) -> bytes | None:
    return None if milliseconds(value) is None else value


_SYNONYMS: Mapping[bytes, tuple[bytes, _Translate]] = {
    b"x-llm-d-inference-fairness-id": (b"x-tenant", _tenant),
    b"x-gateway-inference-fairness-id": (b"x-tenant", _tenant),
    b"x-llm-d-inference-ttl": (b"x-queue-timeout-s", _timeout_s),
    b"x-llm-d-slo-ttft-ms": (b"x-slo-ttft-ms", _target),
    b"x-llm-d-slo-tpot-ms": (b"x-slo-tpot-ms", _target),
}
_OBJECTIVE_NAMES = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
_NAMES = frozenset((*_SYNONYMS, *_OBJECTIVE_NAMES))


@settings
class ObjectiveSettings:
    """An objective, as llm-d and the Gateway API name them: what applies to requests that name it.

    What a request states with its own headers takes precedence.

    Attributes:
        class: class of the requests. With a key that does not allow it, the objective is ignored.
        queue_timeout_s: maximum time in the queue; null for that of the class.
        latency_target: latency target.
    """

    class_: PriorityClass = PriorityClass.DEFAULT
    queue_timeout_s: Annotated[float | None, between(0.001, MAX_QUEUE_TIMEOUT_S)] = None
    latency_target: TargetLimits = field(default_factory=TargetLimits)

    @classmethod
    def with_number(cls, priority: int) -> "ObjectiveSettings":
        """Return the objective that an `InferenceObjective` with this priority stands for."""
        if not priority:
            return cls()
        return cls(class_=PriorityClass.INTERACTIVE if priority > 0 else PriorityClass.BATCH)

    def headers(self) -> dict[bytes, bytes]:
        """Return the gateway's own headers that state the same."""
        target = self.latency_target
        numbers = {
            b"x-queue-timeout-s": self.queue_timeout_s,
            b"x-slo-ttft-ms": None if target.ttft_s is None else target.ttft_s * 1e3,
            b"x-slo-tpot-ms": None if target.tpot_s is None else target.tpot_s * 1e3,
        }
        found = {name: b"%r" % number for name, number in numbers.items() if number is not None}
        if target.refuse:
            found[b"x-slo"] = b"refuse"
        return {b"x-priority": self.class_.value.encode(), **found}


CLASS_OBJECTIVES: Mapping[str, ObjectiveSettings] = {
    each.value: ObjectiveSettings(class_=each) for each in PriorityClass
}
"""Objectives with the names of the classes."""


def with_own_names(
    headers: Mapping[bytes, bytes],
    caller: Caller,
    objectives: Mapping[str, ObjectiveSettings],
    on_ignored: Callable[[bytes, str], None],
) -> Mapping[bytes, bytes]:
    """Return the headers of a request, with the gateway's own in place of synonyms.

    Args:
        objectives: all known objectives by name in lower case.
        on_ignored: called with the name of each synonym whose value is invalid or not allowed for the caller,
            and with the objective that it names; empty for other synonyms.
    """
    if _NAMES.isdisjoint(headers):
        return headers
    found = dict(headers)
    for name, (own, translate) in _SYNONYMS.items():
        if name not in headers:
            continue
        value = translate(found.pop(name), caller)
        if value is None:
            on_ignored(name, "")
        else:
            found.setdefault(own, value)
    # Last, because the other synonyms also state what the request itself wants.
    for name in _OBJECTIVE_NAMES:
        if name not in headers:
            continue
        named = header_text(headers[name]).strip().lower()
        objective = objectives.get(named)
        if objective is not None and caller.may_use_class(objective.class_):
            return {**objective.headers(), **found}
        on_ignored(name, named)
    return found


# Wider numbers are invalid, and would not fit the frames of the control channel.
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
TokenLimit = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
# As wide as vLLM's, because some clients send a time in nanoseconds.
EnginePriority = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

ABSENT = msgspec.Raw()
# Default of OpenAI and vLLM for completions only.
COMPLETION_DEFAULT_MAX_TOKENS = 16


class PartFields(msgspec.Struct, gc=False):
    """Part of a message's content. Parts without text are images, audio or files."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: msgspec.Raw = ABSENT
    image_embeds: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT
    audio_url: msgspec.Raw = ABSENT
    audio_embeds: msgspec.Raw = ABSENT
    video_url: msgspec.Raw = ABSENT
    file: msgspec.Raw = ABSENT
    file_data: msgspec.Raw = ABSENT

    @property
    def media(self) -> tuple[msgspec.Raw, ...]:
        """Media fields, which replace the text."""
        images, sounds = (self.image_url, self.image_embeds), (self.input_audio, self.audio_url)
        return (*images, *sounds, self.audio_embeds, self.video_url, self.file, self.file_data)


Content = str | list[str | PartFields] | None


class MessageFields(msgspec.Struct, gc=False):
    """One message of a chat."""

    role: str | None = None
    content: Content = None
    tool_calls: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    reasoning_content: msgspec.Raw = ABSENT

    @property
    def is_plain(self) -> bool:
        """True if there is only a role and content, as in most messages."""
        return self.tool_calls is self.function_call is self.reasoning is self.reasoning_content is ABSENT


class InputItem(msgspec.Struct, gc=False):
    """One item of a Responses input: a message, a tool call or a tool's output."""

    role: str | None = None
    content: Content = None
    arguments: str | None = None
    output: str | list[str | PartFields] | PartFields | None = None
    summary: list[PartFields] | None = None


class StreamOptionFields(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None


class BodyFields(msgspec.Struct):
    """Fields of all endpoints."""

    model: str
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    priority: EnginePriority | None = None
    cache_salt: str | None = None

    @property
    def end_user(self) -> str | None:
        """End user named by the client; None or empty if it names none."""
        return self.safety_identifier or self.user


class GenerationFields(BodyFields):
    """Fields of all OpenAI endpoints that generate text."""

    stream: bool | None = None
    # Ids of a conversation, see `reader.program_hint`.
    session_id: msgspec.Raw = ABSENT
    prompt_cache_key: msgspec.Raw = ABSENT
    metadata: msgspec.Raw = ABSENT
    nvext: msgspec.Raw = ABSENT
    # Fields that engines reject or omit in streams.
    prompt_logprobs: msgspec.Raw = ABSENT
    use_beam_search: msgspec.Raw = ABSENT
    best_of: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT
    return_token_ids: msgspec.Raw = ABSENT
    # With `echo`, ids and logprobs of the prompt appear in only one of the two forms.
    echo: msgspec.Raw = ABSENT


class UsageOnRequestFields(GenerationFields):
    """Fields of the endpoints whose streams report usage only on request."""

    stream_options: StreamOptionFields | None = None

    @property
    def usage_requested(self) -> bool:
        """True if the client requests usage itself, so it is not hidden."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def may_be_assembled(self) -> bool:
        """True if the answer is not streamed, and a stream would carry the same information."""
        if self.stream or self.stream_options is not None:
            return False
        others = self.prompt_logprobs is self.use_beam_search is self.best_of is self.kv_transfer_params
        return others and self.echo is self.return_token_ids is self.prompt_logprobs is ABSENT


class ChatFields(UsageOnRequestFields, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[MessageFields]
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n: Count | None = None
    tools: msgspec.Raw = ABSENT
    functions: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    response_format: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    modalities: msgspec.Raw = ABSENT

    @property
    def may_be_assembled(self) -> bool:
        """See `UsageOnRequestFields`. Streams parse tool calls differently than finished texts."""
        others = self.tools is self.functions is self.audio is self.modalities is ABSENT
        return others and super().may_be_assembled


# Texts or token ids, of one prompt or of several.
Prompts = str | list[str | int | list[int]]


class CompletionFields(UsageOnRequestFields, kw_only=True):
    """`/v1/completions`."""

    prompt: Prompts | None = None
    prompt_embeds: msgspec.Raw = ABSENT
    suffix: str | None = None
    max_tokens: TokenLimit | None = COMPLETION_DEFAULT_MAX_TOKENS
    n: Count | None = None
    response_format: msgspec.Raw = ABSENT


class ResponsesFields(GenerationFields, kw_only=True):
    """`/v1/responses`."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = ABSENT
    request_id: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT


class EmbeddingFields(BodyFields, kw_only=True):
    """`/v1/embeddings` and `/classify`; vLLM also takes chat messages here."""

    input: Prompts | None = None
    messages: list[MessageFields] | None = None


class ModelOnly(msgspec.Struct):
    """`/tokenize` and `/detokenize`: only the model is needed to find a replica."""

    model: str


# -- Anthropic's Messages ---------------------------------------------------------------------------------


class BlockFields(msgspec.Struct, gc=False):
    """Block of a message: text, thinking, a tool call or its result. Other blocks are media."""

    type: str | None = None
    name: str | None = None
    text: str | None = None
    thinking: str | None = None
    content: Content = None
    input: msgspec.Raw = ABSENT
    tool: msgspec.Raw = ABSENT
    source: msgspec.Raw = ABSENT


Blocks = str | list[BlockFields]


class TurnFields(msgspec.Struct, gc=False):
    """One message of a conversation."""

    role: str
    content: Blocks


class MetadataFields(msgspec.Struct):
    """End user named by the client."""

    user_id: str | None = None


class MessagesFields(BodyFields, kw_only=True):
    """`/v1/messages`."""

    messages: list[TurnFields]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    system: Blocks | None = None
    stream: bool | None = None
    metadata: MetadataFields | None = None
    tools: msgspec.Raw = ABSENT
    output_config: msgspec.Raw = ABSENT

    @property
    def end_user(self) -> str | None:
        """End user in the metadata."""
        return self.metadata.user_id if self.metadata is not None else None


class CountTokensFields(ModelOnly):
    """`/v1/messages/count_tokens`: only the model is needed to find a replica."""


# -- forms ------------------------------------------------------------------------------------------------


class FormFields(msgspec.Struct):
    """Form with a file; the gateway reads only the model's name."""

    file: bytes
    model: str
