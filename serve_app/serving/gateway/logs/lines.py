"""What the log says of a concluded request, as text and as the fields of a JSON document.

Both have the same names and the same values. Nothing stands there that a client could use to forge a line:
names are checked when they are read, and the rest is quoted or has its unfit characters replaced.
"""

import re
from functools import lru_cache

from serve_app.errors import HTTP_STATUS, Outcome
from serve_app.serving.gateway.answer.client_stream import exchange_of
from serve_app.serving.gateway.logs.concluded import ConcludedRequest
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.tracing.trace_context import trace_parent

Value = str | int | float

# An engine's error may repeat a prompt, and a client's value what it likes.
_DETAIL_CHARACTERS = 300
_ADDRESS_CHARACTERS = 200
_UNFIT_FOR_ADDRESS = re.compile(r"[^0-9A-Za-z.:,%_\[\]-]+")


def text_line(concluded: ConcludedRequest) -> str:
    """One line of `name=value`."""
    # Written out, since a loop over fields costs several times as much.
    record, incoming = concluded.record, concluded.incoming
    client, forwarded_for = _addresses(incoming)
    key = f" key={concluded.key_id}" if concluded.key_id else ""
    said = f" forwarded_for={forwarded_for}" if forwarded_for else ""
    line = (
        f"event=concluded outcome={record.outcome} status={_status(concluded)} model={concluded.model or '-'}"
        f" endpoint={concluded.endpoint} class={record.priority} tenant={record.tenant}{key}"
        f" client={client or '-'}{said} e2e_s={record.e2e_s:.4f}"
    )
    if record.dispatched_at is not None:
        line += (
            f" queue_wait_s={record.queue_wait_s:.4f} pool={record.pool} replica={record.replica}"
            f" length_queue={record.length_queue} estimated_tokens={record.estimated_tokens}"
            f" attempts={concluded.attempts}"
        )
    if record.first_token_at is not None:
        line += f" ttft_s={record.ttft_s:.4f}"
    if record.prompt_tokens or record.output_tokens:
        line += f" prompt_tokens={record.prompt_tokens} output_tokens={record.output_tokens}"
    line += f" request_id={record.request_id} client_request_id={incoming.client_request_id}"
    if trace_id := _trace_id(incoming):
        line += f" trace_id={trace_id}"
    if record.detail:
        line += f" detail={record.detail[:_DETAIL_CHARACTERS]!r}"
    return line


def json_fields(concluded: ConcludedRequest) -> dict[str, Value]:
    """The same by name; numbers are numbers."""
    record, incoming = concluded.record, concluded.incoming
    client, forwarded_for = _addresses(incoming)
    fields: dict[str, Value | None] = {
        "event": "concluded",
        "outcome": record.outcome.value,
        "status": _status(concluded),
        "model": concluded.model or "-",
        "endpoint": concluded.endpoint,
        "class": record.priority.value,
        "tenant": record.tenant,
        "key": concluded.key_id or None,
        "client": client or "-",
        "forwarded_for": forwarded_for or None,
        "e2e_s": round(record.e2e_s, 4),
    }
    if record.queue_wait_s is not None:
        fields |= {
            "queue_wait_s": round(record.queue_wait_s, 4),
            "pool": record.pool,
            "replica": record.replica,
            "length_queue": record.length_queue,
            "estimated_tokens": record.estimated_tokens,
            "attempts": concluded.attempts,
        }
    if record.ttft_s is not None:
        fields["ttft_s"] = round(record.ttft_s, 4)
    if record.prompt_tokens or record.output_tokens:
        fields |= {"prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens}
    fields |= {
        "request_id": record.request_id,
        "client_request_id": incoming.client_request_id,
        "trace_id": _trace_id(incoming) or None,
        "detail": record.detail[:_DETAIL_CHARACTERS] or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _status(concluded: ConcludedRequest) -> int:
    return concluded.status or HTTP_STATUS[Outcome.CANCELLED]


def _addresses(incoming: IncomingRequest) -> tuple[str, str]:
    """Who has connected, and what it says of those before it; empty where nothing is known.

    HAProxy adds who has connected to it at the end of `x-forwarded-for`; where it stands in front, it alone
    connects to a gateway that serves connections itself. All that stands before is only said.
    """
    scope = incoming.scope
    peer = scope.get("client")
    address = str(peer[0]) if peer else ""
    if b"x-forwarded-for" not in incoming.headers:
        return address, ""
    said = b",".join([value for name, value in scope["headers"] if name == b"x-forwarded-for"])
    exchange = exchange_of(scope)
    behind_front_end = exchange is not None and not exchange.peer_is_client
    return _told_apart(said, "" if behind_front_end else address)


# Most requests come from few places.
@lru_cache(maxsize=1024)
def _told_apart(said: bytes, address: str) -> tuple[str, str]:
    """The last address as that of the client, unless another is known."""
    places = [part.strip() for part in said.decode("latin-1").split(",") if part.strip()]
    if places and not address:
        address = places.pop()
    return _fit(address), _fit(",".join(places))


def _fit(address: str) -> str:
    return _UNFIT_FOR_ADDRESS.sub("_", address)[:_ADDRESS_CHARACTERS]


def _trace_id(incoming: IncomingRequest) -> str:
    """Of the request's own trace, or of the client's where this gateway keeps none of it."""
    if incoming.trace.trace_id:
        return incoming.trace.trace_id
    parent = trace_parent(incoming.headers)
    return "" if parent is None else parent.trace_id.decode("ascii")
