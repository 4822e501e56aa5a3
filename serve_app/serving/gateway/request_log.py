"""Log of concluded requests, and their server metrics in OpenTelemetry's conventions.

`RequestLog` writes one line for each request, in batches a few times per second. Writing lines one by one
would cost about as much as the rest of a small request: a record, a look-up of its caller, a check for
rotation, a write. Lines of a batch share that cost and the timestamp of the write. A process that is killed
loses the last batch.

Completed requests are always logged. Under overload most requests are rejected, with thousands of equal lines
per second. So for each other outcome a few lines per second are written, and the rest is counted in one line,
`event=log_suppressed`.

Text lines and JSON documents have the same names and values. Clients cannot forge lines: names are checked
when they are read, and other values are quoted or sanitized.

`GenAiMetrics` are metrics for generative AI on `/metrics`, and by OTLP if configured. One table defines both
forms. Prometheus' form replaces dots by underscores and appends the unit. The names and buckets are those of
the conventions (gen-ai-metrics, status Development, November 2026).
"""

import asyncio
import contextvars
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from logging.handlers import MemoryHandler, RotatingFileHandler
from time import monotonic
from typing import Any, NamedTuple, Protocol, TextIO

import msgspec
from prometheus_client import CollectorRegistry

from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import HTTP_STATUS, Conclusion, Outcome
from serve_app.serving.gateway.answer.responses import ClientGone, RequestRejected
from serve_app.serving.gateway.keys import DEFAULT_TENANT
from serve_app.serving.gateway.path import Request
from serve_app.serving.gateway.tracing import request_trace
from serve_app.serving.gateway.tracing.request_trace import trace_parent
from serve_app.serving.metric_cells import Cells, HistogramCell, histograms


class ConcludedRequest(RequestRecord, frozen=True, kw_only=True):
    """Record of a concluded request on the gateway's clock, with what only a gateway knows.

    Attributes:
        model: the model that served or rejected it; empty if it was rejected before its model was known.
        endpoint: its path, or `-` for an unknown path.
        key_id: public id of its API key; empty without a key.
        status: HTTP status of the answer; 0 if the client received none.
    """

    request: Request
    model: str
    endpoint: str
    key_id: str = ""
    status: int = 0

    @property
    def shown_status(self) -> int:
        """Status for logs and traces, which show a client that left as 499."""
        return self.status or HTTP_STATUS[Outcome.CANCELLED]


def concluded(request: Request) -> ConcludedRequest:
    """Return the record of a request that reached a scheduler."""
    submission, usage, attempt = request.submission, request.counts.usage, request.attempt
    conclusion = request.conclusion or Conclusion(Outcome.FAILED)
    dispatch = None if attempt is None else attempt.dispatch
    return ConcludedRequest(
        request=request,
        request_id=request.request_id,
        arrived_at=request.arrived_at,
        dispatched_at=None if attempt is None else attempt.granted_at,
        first_token_at=request.first_token_at,
        finished_at=monotonic(),
        outcome=conclusion.outcome,
        prompt_tokens=0 if usage is None else usage.prompt_tokens,
        output_tokens=0 if usage is None else usage.output_tokens,
        tenant=submission.tenant,
        priority=submission.priority,
        pool="" if dispatch is None else dispatch.pool,
        replica="" if dispatch is None else dispatch.replica_id,
        length_queue="" if dispatch is None else dispatch.length_queue,
        estimated_tokens=None if dispatch is None else dispatch.estimated_tokens,
        detail=conclusion.message,
        model=submission.spec.model,
        endpoint=request.path,
        key_id="" if submission.key is None else submission.key.key_id,
        status=request.exchange.status,
    )


def rejected(request: Request, endpoint: str, end: RequestRejected | ClientGone) -> ConcludedRequest:
    """Return the record of a request that never reached a scheduler.

    Args:
        endpoint: its path, or `-` for an unknown path.
    """
    key = None if request.caller is None else request.caller.key
    return ConcludedRequest(
        request=request,
        request_id=request.request_id,
        arrived_at=request.arrived_at,
        finished_at=monotonic(),
        outcome=end.outcome if isinstance(end, RequestRejected) else Outcome.CANCELLED,
        prompt_tokens=0,
        output_tokens=0,
        tenant=DEFAULT_TENANT if key is None else key.tenant,
        detail=str(end),
        model="",
        endpoint=endpoint,
        key_id="" if key is None else key.id,
        status=request.exchange.status,
    )


Value = str | int | float

# An engine's error may contain the prompt, and headers contain anything.
_DETAIL_CHARACTERS = 300
_ADDRESS_CHARACTERS = 200
_UNFIT_FOR_ADDRESS = re.compile(r"[^0-9A-Za-z.:,%_\[\]-]+")


def text_line(record: ConcludedRequest) -> str:
    """Return a request as a line of `name=value` pairs."""
    # Unrolled, because a loop over fields costs several times as much.
    request = record.request
    client, forwarded_for = _addresses(request)
    route = f" route={request.fallbacks.route}" if request.fallbacks is not None else ""
    key = f" key={record.key_id}" if record.key_id else ""
    forwarded = f" forwarded_for={forwarded_for}" if forwarded_for else ""
    line = (
        f"event=concluded outcome={record.outcome} status={record.shown_status} model={record.model or '-'}"
        f"{route} endpoint={record.endpoint} class={record.priority} tenant={record.tenant}{key}"
        f" client={client or '-'}{forwarded} e2e_s={record.e2e_s:.4f}"
    )
    if record.dispatched_at is not None:
        line += (
            f" queue_wait_s={record.queue_wait_s:.4f} pool={record.pool} replica={record.replica}"
            f" length_queue={record.length_queue} estimated_tokens={record.estimated_tokens}"
            f" attempts={len(request.attempts)}"
        )
    if record.first_token_at is not None:
        line += f" ttft_s={record.ttft_s:.4f}"
    if record.prompt_tokens or record.output_tokens:
        line += f" prompt_tokens={record.prompt_tokens} output_tokens={record.output_tokens}"
    line += f" request_id={record.request_id} client_request_id={request.client_request_id}"
    if trace_id := _trace_id(request):
        line += f" trace_id={trace_id}"
    if record.detail:
        line += f" detail={record.detail[:_DETAIL_CHARACTERS]!r}"
    return line


def json_fields(record: ConcludedRequest) -> dict[str, Value]:
    """Return a request as fields of a JSON document."""
    request = record.request
    client, forwarded_for = _addresses(request)
    fields: dict[str, Value | None] = {
        "event": "concluded",
        "outcome": record.outcome.value,
        "status": record.shown_status,
        "model": record.model or "-",
        "route": None if request.fallbacks is None else request.fallbacks.route,
        "endpoint": record.endpoint,
        "class": record.priority.value,
        "tenant": record.tenant,
        "key": record.key_id or None,
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
            "attempts": len(request.attempts),
        }
    if record.ttft_s is not None:
        fields["ttft_s"] = round(record.ttft_s, 4)
    if record.prompt_tokens or record.output_tokens:
        fields |= {"prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens}
    fields |= {
        "request_id": record.request_id,
        "client_request_id": request.client_request_id,
        "trace_id": _trace_id(request) or None,
        "detail": record.detail[:_DETAIL_CHARACTERS] or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _addresses(request: Request) -> tuple[str, str]:
    """Return the peer's address and its `x-forwarded-for`; each is empty if unknown."""
    address = request.client
    if b"x-forwarded-for" not in request.headers:
        return address, ""
    claimed = b",".join([value for name, value in request.exchange.headers if name == b"x-forwarded-for"])
    return address, _joined(claimed)


# Most requests arrive from few addresses.
@lru_cache(maxsize=1024)
def _joined(claimed: bytes) -> str:
    places = [part.strip() for part in claimed.decode("latin-1").split(",")]
    return _fit(",".join(filter(None, places)))


def _fit(address: str) -> str:
    return _UNFIT_FOR_ADDRESS.sub("_", address)[:_ADDRESS_CHARACTERS]


def _trace_id(request: Request) -> str:
    """Return the id of the request's own trace, or of the client's if this gateway records none."""
    if request.trace is not None:
        return request.trace.trace_id
    parent = trace_parent(request.headers)
    return "" if parent is None else parent.trace_id.decode("ascii")


_INTERVAL_S = 0.2
# Batch size that is written without waiting for the timer.
_MAX_LINES = 1_000
# Lines per second of each outcome other than `completed`.
MAX_REJECTED_LINES = 10
_SECOND_S = 1.0
# Placeholder message: shows where a handler's format puts the message.
_PLACE = "\x00"
# Handler types whose treatment of records is known.
_PLAIN_HANDLERS = (logging.StreamHandler, logging.FileHandler, RotatingFileHandler)

_encoder = msgspec.json.Encoder()

Line = ConcludedRequest | Counter[Outcome]
"""A request, or the number of suppressed lines by outcome."""


class RequestLog:
    """Ordered buffer of lines for a logger's handlers."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lines: list[Line] = []
        self._timer: asyncio.TimerHandle | None = None
        self._in_this_second: Counter[Outcome] = Counter()
        self._second: asyncio.TimerHandle | None = None

    def add(self, concluded: ConcludedRequest) -> None:
        """Queue the line of a request, unless its outcome has too many; on the event loop."""
        outcome = concluded.outcome
        if outcome is not Outcome.COMPLETED:
            self._in_this_second[outcome] += 1
            if self._second is None:
                self._second = _later(_SECOND_S, self._end_second)
            if self._in_this_second[outcome] > MAX_REJECTED_LINES:
                return
        self._lines.append(concluded)
        if len(self._lines) >= _MAX_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = _later(_INTERVAL_S, self.flush)

    def _end_second(self) -> None:
        """Queue the count of suppressed lines, and start a new second."""
        if self._second is not None:
            self._second.cancel()
            self._second = None
        missing = Counter({name: count - MAX_REJECTED_LINES for name, count in self._in_this_second.items()})
        self._in_this_second.clear()
        if missing := +missing:
            self._lines.append(missing)
            self._write_lines()

    def flush(self) -> None:
        """Write all queued lines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._write_lines()

    def close(self) -> None:
        """Write all queued lines and counts."""
        self._end_second()
        self.flush()

    def _write_lines(self) -> None:
        lines, self._lines = self._lines, []
        if not lines or not self._logger.isEnabledFor(logging.INFO):
            return
        logger = self._logger
        record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, _PLACE, (), None)
        for handler in _handlers(logger):
            _write(handler, record, lines)


def _later(delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    # In an empty context, because Serve's log format adds the request of the context.
    return asyncio.get_running_loop().call_later(delay_s, call, context=contextvars.Context())


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    """Yield the handlers that receive a logger's records."""
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _write(handler: logging.Handler, record: logging.LogRecord, lines: Sequence[Line]) -> None:
    if record.levelno < handler.level:
        return
    if isinstance(handler, MemoryHandler) and handler.target is not None:
        if handler.filter(record):
            # Its buffered records are older.
            handler.flush()
            _write(handler.target, record, lines)
    elif isinstance(handler, logging.StreamHandler) and _is_plain(handler):
        _write_together(handler, record, lines)
    else:
        for line in lines:
            handler.handle(logging.makeLogRecord({**record.__dict__, "msg": _text(line)}))


def _is_plain(handler: "logging.StreamHandler[TextIO]") -> bool:
    """Return whether a handler treats records as the standard library does and its stream is open."""
    return type(handler) in _PLAIN_HANDLERS and handler.stream is not None


def _write_together(
    handler: "logging.StreamHandler[TextIO]", record: logging.LogRecord, lines: Sequence[Line]
) -> None:
    if not handler.filter(record):
        return
    handler.acquire()
    try:
        if isinstance(handler, RotatingFileHandler) and handler.shouldRollover(record):
            handler.doRollover()
        stream: TextIO = handler.stream
        stream.write(_formatted(handler.format(record), lines, handler.terminator))
        handler.flush()
    except Exception:  # noqa: BLE001 - as handlers do
        handler.handleError(record)
    finally:
        handler.release()


def _formatted(made: str, lines: Sequence[Line], terminator: str) -> str:
    """Return each line in the format of the one formatted record, which may be a JSON document."""
    document = _document(made)
    if document is not None:
        return "".join([f"{_json(document, line)}{terminator}" for line in lines])
    place = json.dumps(_PLACE)[1:-1]
    if place in made:
        before, _, after = made.partition(place)
        return "".join([f"{before}{json.dumps(_text(line))[1:-1]}{after}{terminator}" for line in lines])
    before, _, after = made.partition(_PLACE)
    return "".join([f"{before}{_text(line)}{after}{terminator}" for line in lines])


def _document(made: str) -> dict[str, Any] | None:
    """Return a formatted record as a JSON document; None unless its message is a field of one."""
    if not made.startswith("{"):
        return None
    try:
        found = json.loads(made)
    except ValueError:
        return None
    if not isinstance(found, dict) or found.get("message") != _PLACE:
        return None
    # Serve uses `replica` for this process; in this log it is the replica of the request, as in text.
    if "replica" in found:
        found["gateway"] = found.pop("replica")
    return found


def _json(document: Mapping[str, Any], line: Line) -> str:
    fields = _counts(line) if isinstance(line, Counter) else json_fields(line)
    return _encoder.encode({**document, "message": fields["event"], **fields}).decode()


def _text(line: Line) -> str:
    if isinstance(line, Counter):
        return " ".join([f"{name}={value}" for name, value in _counts(line).items()])
    return text_line(line)


def _counts(missing: Counter[Outcome]) -> dict[str, str | int]:
    by_outcome = {outcome.value: count for outcome, count in missing.most_common()}
    return {"event": "log_suppressed", "count": missing.total(), **by_outcome}


class Instrument(NamedTuple):
    """A histogram of the conventions; its unit is the second."""

    name: str
    text: str
    bounds_s: tuple[float, ...]


REQUEST_DURATION = Instrument(
    "gen_ai.server.request.duration",
    "Time from the arrival of a request to the end of its answer.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN = Instrument(
    "gen_ai.server.time_to_first_token",
    "Time from the arrival of a request to its first token, of completed streams.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = Instrument(
    "gen_ai.server.time_per_output_token",
    "Time per output token after the first, mean of each completed stream.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
INSTRUMENTS = (REQUEST_DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN)
ATTRIBUTES = (
    request_trace.OPERATION_NAME,
    request_trace.PROVIDER_NAME,
    request_trace.REQUEST_MODEL,
    request_trace.ERROR_TYPE,
)


class MetricExport(Protocol):
    """Export of measurements by OTLP."""

    def record(self, instrument: Instrument, seconds: float, attributes: Mapping[str, str]) -> None:
        """Add a measurement."""
        ...

    def close(self, within_s: float) -> None:
        """Export the last measurements; block for at most `within_s` seconds."""
        ...


class GenAiMetrics:
    """The three histograms of one gateway. An absent `error.type` is an empty label on `/metrics`.

    Args:
        export: None without OTLP.
    """

    def __init__(self, gateway_id: str, registry: CollectorRegistry, export: MetricExport | None) -> None:
        self._gateway_id = gateway_id
        self._export = export
        labels = ("gateway", *(name.replace(".", "_") for name in ATTRIBUTES))
        self._cells: dict[Instrument, Cells[HistogramCell]] = {
            each: histograms(
                registry, each.name.replace(".", "_") + "_seconds", each.text, labels, each.bounds_s
            )
            for each in INSTRUMENTS
        }

    def observe(self, record: ConcludedRequest) -> None:
        """Add a request to a model that has ended."""
        operation = record.request.endpoint.operation
        if not operation:
            return
        values = (
            operation,
            request_trace.PROVIDER,
            record.model,
            "" if record.completed else record.outcome.value,
        )
        self._add(REQUEST_DURATION, record.e2e_s, values)
        if not record.completed:
            return
        if (ttft_s := record.ttft_s) is not None:
            self._add(TIME_TO_FIRST_TOKEN, ttft_s, values)
        if (tpot_s := record.tpot_s) is not None:
            self._add(TIME_PER_OUTPUT_TOKEN, tpot_s, values)

    def _add(self, instrument: Instrument, seconds: float, values: tuple[str, ...]) -> None:
        self._cells[instrument][(self._gateway_id, *values)].observe(seconds)
        if self._export is not None:
            attributes = {name: value for name, value in zip(ATTRIBUTES, values, strict=True) if value}
            self._export.record(instrument, seconds, attributes)

    def close(self, within_s: float) -> None:
        """Export the last measurements."""
        if self._export is not None:
            self._export.close(within_s)
