"""Event streams: scans those of engines, reads token counts, and writes to streams that wait.

- `StreamScanner`: reads the usage of a stream, and hides events that the client did not request.
- `counts_of`, `usage_of`: token counts and times of an answer.
- `ending_of`: the end of an answer, which predicts the next request of the same program.
- `QueuedComments`, `QueueUpdates`: messages in a stream whose request is queued.

`StreamScanner` works on bytes and passes them on unchanged. TCP may cut the stream anywhere, so:

- Only whole events are passed on. The beginning of an event waits for its rest, because after a failure the
  error event must not land inside another event.
- Bytes that end with an event and contain neither usage nor error, nearly all, are passed on unparsed. JSON
  escapes quotes inside strings, so generated text cannot hide the key.
- An event is dropped only if it has usage and no choices, and the client did not request it.

The client's bytes therefore do not depend on TCP's segmentation.

Token counts and times are read from these fields only:

| answers to           | prompt          | output              | of the prompt, from a cache           |
|----------------------|-----------------|---------------------|---------------------------------------|
| chats, completions   | `prompt_tokens` | `completion_tokens` | `prompt_tokens_details.cached_tokens` |
| Responses            | `input_tokens`  | `output_tokens`     | `input_tokens_details.cached_tokens`  |
| Messages             | `input_tokens`  | `output_tokens`     | `cache_read_input_tokens`             |
| embeddings, scores   | `prompt_tokens` |                     |                                       |
| Cohere's embeddings  | `input_tokens`  |                     |                                       |

Reasoning tokens are in `completion_tokens_details` or `output_tokens_details`.
Messages count tokens read from and written to a cache separately from `input_tokens`.
Cohere's have no `usage`; their count is among the billed units in `meta`.
Times are from vLLM's `metrics`, which needs `enable_per_request_metrics`.

`ending_of` reads the end from:

| answers to         | whole answer                     | stream                                         |
|--------------------|----------------------------------|------------------------------------------------|
| chats, completions | `finish_reason` of the choices   | the same, in the last events up to the usage   |
| Responses          | `status`, and calls in `output`  | the same, in the `response` of the usage event |
| Messages           | `stop_reason`                    | the same, in the `delta` of the usage event    |

Only events near the usage are searched. Of several streamed choices, the last ones to end therefore count.

`QueuedComments`. Server-sent events allow comments, lines that begin with a colon, which clients ignore. The
first one starts the answer: its status is 200, and its headers cannot describe the dispatch, which is not
known yet. It is therefore sent only after an interval in which most requests are dispatched or rejected.

`QueueUpdates`. Queue updates are for clients that subscribe with `x-ewsjf-queue`. The first one follows after
a short delay, so that requests that are dispatched or rejected at once have their own status and headers, at
no cost. The scheduler decides when there is news. While it is disconnected, the client is notified of that
instead.
"""

import asyncio
import enum
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from serve_app.request import EngineTimes, TurnEnd, Usage
from serve_app.serving.channel.scheduler_client import RequestOutlook
from serve_app.serving.gateway.answer.responses import ClientExchange, encode, is_dead
from serve_app.serving.gateway.upstream import HeaderList, UpstreamError

_ENDS: dict[str | None, TurnEnd | None] = {
    None: None,
    "tool_calls": TurnEnd.TOOLS,
    "function_call": TurnEnd.TOOLS,
    "tool_use": TurnEnd.TOOLS,
    "stop": TurnEnd.DONE,
    "end_turn": TurnEnd.DONE,
    "stop_sequence": TurnEnd.DONE,
}
_BY_PRECEDENCE = tuple(TurnEnd)
# Items whose results the client sends; engines run other calls, such as `mcp_call`, themselves.
_CALLS = frozenset({"function_call", "custom_tool_call"})
# JSON escapes quotes inside strings, so generated text cannot match.
_FINISH_REASON = re.compile(rb'"finish_reason":\s*"(\w+)"')


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str | None = None


class _Item(msgspec.Struct, gc=False):
    type: str | None = None


class _Answer(msgspec.Struct):
    """A whole answer, or an event that carries the end of one."""

    choices: list[_Choice] = []
    stop_reason: str | None = None
    status: str | None = None
    output: list[_Item] = []
    delta: "_Answer | None" = None
    response: "_Answer | None" = None


_decoder = msgspec.json.Decoder(_Answer)


def ending_of(document: bytes) -> TurnEnd | None:
    """Return the end that a whole answer or the usage event of a stream states; None if it states none."""
    try:
        found = _decoder.decode(document)
    except (ValueError, RecursionError):
        return None
    found = found.response or found.delta or found
    reasons = [found.stop_reason, *[choice.finish_reason for choice in found.choices]]
    ending = combined([_ENDS.get(reason, TurnEnd.OTHER) for reason in reasons])
    if ending is not None or found.status is None:
        return ending
    if found.status != "completed":
        return TurnEnd.OTHER
    return TurnEnd.TOOLS if any(item.type in _CALLS for item in found.output) else TurnEnd.DONE


def ending_in(chunks: bytes) -> TurnEnd | None:
    """Return the end that events of a chat or completion state; None if they state none."""
    return combined([_ENDS.get(reason.decode(), TurnEnd.OTHER) for reason in _FINISH_REASON.findall(chunks)])


def combined(ends: Collection[TurnEnd | None]) -> TurnEnd | None:
    """Return the end of an answer from those of its choices: calls of tools take precedence."""
    for end in _BY_PRECEDENCE:
        if end in ends:
            return end
    return None


NO_TIMES = msgspec.Raw()
_LONGEST_ID = 200
# Larger values are not plausible times of a request.
_LONGEST_MS = 1e9


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class RawUsage(msgspec.Struct, gc=False):
    """The `usage` object of any endpoint."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    @property
    def output(self) -> int | None:
        """Tokens of the answer; None if they are not counted."""
        return self.completion_tokens if self.completion_tokens is not None else self.output_tokens

    def counted(self, ending: TurnEnd | None = None, before: Usage | None = None) -> Usage | None:
        """Return the counts in a common form, with the end of the answer; None if the engine sent none.

        Anthropic's last event may count only the output; other counts are then those of `before`.
        """
        prompt = self.prompt_tokens if self.prompt_tokens is not None else self.input_tokens
        output = self.output
        if prompt is None:
            if before is None or output is None:
                return None
            return Usage(
                prompt_tokens=before.prompt_tokens,
                output_tokens=output,
                cached_tokens=before.cached_tokens,
                ending=ending,
            )
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details is not None else None
        of_output = self.completion_tokens_details or self.output_tokens_details
        reasoning = of_output.reasoning_tokens if of_output is not None else None
        beside = self.cache_read_input_tokens or 0
        prompt += beside + (self.cache_creation_input_tokens or 0)
        return Usage(
            prompt_tokens=prompt,
            output_tokens=output or 0,
            cached_tokens=cached or beside,
            ending=ending,
            reasoning_tokens=reasoning or 0,
        )


class _RawTimes(msgspec.Struct, gc=False):
    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None


_times_decoder = msgspec.json.Decoder(_RawTimes)


def engine_times_of(metrics: msgspec.Raw) -> EngineTimes | None:
    """Parse a `metrics` object; None if it is absent or from another kind of engine."""
    if metrics is NO_TIMES:
        return None
    try:
        raw = _times_decoder.decode(metrics)
    except (ValueError, RecursionError):
        return None
    # vLLM measures time to first token from the start of processing, without the queue time.
    found = (raw.queue_time_ms, raw.time_to_first_token_ms, raw.generation_time_ms)
    times = EngineTimes(*(ms / 1e3 if ms is not None and 0 <= ms < _LONGEST_MS else None for ms in found))
    return None if times == EngineTimes() else times


class _Meta(msgspec.Struct):
    billed_units: RawUsage | None = None


class _Envelope(msgspec.Struct):
    id: Any = None
    usage: RawUsage | None = None
    meta: _Meta | None = None
    metrics: msgspec.Raw = NO_TIMES


_usage_decoder = msgspec.json.Decoder(_Envelope)


class Counts(NamedTuple):
    """The figures of a whole answer; each is None or empty if it is absent, or if the answer is not JSON."""

    usage: Usage | None = None
    times: EngineTimes | None = None
    response_id: str = ""


def counts_of(body: bytes) -> Counts:
    """Return the figures of a whole answer."""
    try:
        found = _usage_decoder.decode(body)
    except (ValueError, RecursionError):
        return Counts()
    raw = found.usage if found.meta is None else found.meta.billed_units
    usage = raw.counted(ending_of(body) if raw.output else None) if raw is not None else None
    return Counts(usage, engine_times_of(found.metrics), _id(found.id))


def _id(stated: object) -> str:
    return stated if isinstance(stated, str) and len(stated) <= _LONGEST_ID else ""


def usage_of(body: bytes) -> Usage | None:
    """Return the usage of a whole answer; None if it has none."""
    return counts_of(body).usage


_EVENT_END = re.compile(rb"\n\r?\n")
# Keys of events that are parsed.
_INSPECTED = re.compile(rb'"(?:usage|error)"')
_LINE = re.compile(rb"[^\r\n]+")
_LONGEST_KIND = 1_000
# A chunk of a chat before its first token, up to the end of its choice.
_ROLE_ALONE = (
    rb'data: ?\{[^\n]*?"delta":\s*\{\s*"role":\s*"assistant"(?:,\s*"\w+":\s*(?:""|null))*\s*\}'
    rb'[^\n]*?"finish_reason":\s*null'
)
# Longer events cannot be usage events, and are passed on in parts.
_MAX_HELD_BYTES = 1024 * 1024


class _Response(msgspec.Struct):
    id: Any = None
    usage: RawUsage | None = None
    metrics: msgspec.Raw = NO_TIMES


class _EngineError(msgspec.Struct):
    message: str | None = None
    code: int | str | None = None
    type: str | None = None

    @property
    def is_engines(self) -> bool:
        """True for a fault of the engine. OpenAI's errors have a status as code, Anthropic's only a type."""
        rejected = isinstance(self.code, int) and 400 <= self.code < 500
        return not rejected and self.type not in _REJECTIONS


class _StreamEvent(msgspec.Struct):
    id: Any = None
    type: str | None = None
    choices: list[msgspec.Raw] | None = None
    usage: RawUsage | None = None
    error: _EngineError | str | None = None
    # In errors a text, and in Anthropic's first event the message that begins.
    message: str | _Response | None = None
    response: _Response | None = None
    metrics: msgspec.Raw = NO_TIMES

    @property
    def counted(self) -> RawUsage | None:
        """Usage, from the field in which this API reports it."""
        if self.usage is not None:
            return self.usage
        whole = self.response or self.message
        return whole.usage if isinstance(whole, _Response) else None

    @property
    def response_id(self) -> str:
        """The answer's id; empty if this event has none."""
        whole = self.response or self.message
        return _id(self.id) or (_id(whole.id) if isinstance(whole, _Response) else "")

    @property
    def times(self) -> EngineTimes | None:
        """Stage times reported next to the usage."""
        return engine_times_of(self.metrics if self.response is None else self.response.metrics)


_stream_decoder = msgspec.json.Decoder(_StreamEvent)
_FAILED_EVENTS = frozenset({"response.failed", "error"})
# Anthropic's error types for faults of the client.
_REJECTIONS = frozenset({"invalid_request_error", "not_found_error", "request_too_large"})


class StreamScanner:
    """Scanner of one stream on its way to the client.

    Args:
        hide_usage: drop the event that carries only usage.

    Attributes:
        events: about the number of whole events so far; each token of the output is in one.
        usage: last usage from the engine; None before the first.
        times: stage times that came with it; None if the engine reports none.
        response_id: the answer's id, from an event with usage; empty before one.
        error: error message from inside the stream; None without an error.
        is_engine_error: the error is the engine's fault, not the request's.
    """

    __slots__ = (
        "_before",
        "_held",
        "_hide_usage",
        "error",
        "events",
        "is_engine_error",
        "response_id",
        "times",
        "usage",
    )

    def __init__(self, *, hide_usage: bool) -> None:
        self.events = 0
        self.usage: Usage | None = None
        self.times: EngineTimes | None = None
        self.response_id = ""
        self.error: str | None = None
        self.is_engine_error = False
        self._hide_usage = hide_usage
        self._held = bytearray()
        # The events before the usage event have the finish reason of a chat.
        self._before = b""

    def feed(self, data: bytes) -> bytes:
        """Add bytes from the engine, and return those that may be sent to the client now."""
        self.events += data.count(b"\n\n") or data.count(b"\n\r\n")
        if self._held or not data.endswith((b"\n\n", b"\n\r\n")):
            data = self._whole(data)
            if not data:
                return self._overflow()
        if _INSPECTED.search(data):
            return self._inspected(data)
        self._before = data
        return data

    def flush(self) -> bytes:
        """End the stream, and return the remaining bytes."""
        rest = bytes(self._held)
        self._held.clear()
        return self._inspected(rest)

    def _whole(self, data: bytes) -> bytes:
        """Buffer bytes, and return the events that are whole now."""
        # Search only the new bytes and the few before them that may begin the end of an event.
        searched_from = max(0, len(self._held) - 2)
        self._held += data
        end = _last_end(self._held, searched_from)
        whole = bytes(memoryview(self._held)[:end])
        del self._held[:end]
        return whole

    def _overflow(self) -> bytes:
        """Return the beginning of an event that is too long to buffer; otherwise empty."""
        if len(self._held) <= _MAX_HELD_BYTES:
            return b""
        # The last two bytes may begin the end of the event.
        part = bytes(memoryview(self._held)[:-2])
        del self._held[:-2]
        return part

    def _inspected(self, events: bytes) -> bytes:
        """Return events without those to hide."""
        return b"".join([event for event in _split(events) if not self._is_hidden(event)])

    def _is_hidden(self, event: bytes) -> bool:
        """Record usage and errors of an event, and return whether to hide it from the client."""
        before, self._before = self._before, event
        if not _INSPECTED.search(event):
            return False
        data = b"\n".join(line[5:].lstrip(b" ") for line in _LINE.findall(event) if line.startswith(b"data:"))
        try:
            parsed = _stream_decoder.decode(data)
        except (ValueError, RecursionError):
            return False
        self._note_error(parsed)
        raw = parsed.counted
        if raw is None:
            return False
        ending = ending_of(data) if parsed.choices is None else ending_in(before + event)
        stated = self.usage.ending if self.usage is not None else None
        self.usage = raw.counted(combined((stated, ending)), self.usage) or self.usage
        self.times, self.response_id = parsed.times, parsed.response_id or self.response_id
        return self._hide_usage and parsed.choices == []

    def _note_error(self, event: _StreamEvent) -> None:
        if event.error is None and event.type not in _FAILED_EVENTS:
            return
        error = event.error
        if isinstance(error, _EngineError):
            self.error = error.message or "the engine reported an error"
            self.is_engine_error = error.is_engines
        else:
            message_text = event.message if isinstance(event.message, str) else None
            self.error = error or message_text or "the engine reported an error"
            self.is_engine_error = True


class Announcements:
    """Matcher for events that announce an answer before any output: comments, and events of some types.

    An event's type is on its first line or in the first field of its data. Events of chats have none. Theirs
    is an announcement if it has the role and no content.
    """

    __slots__ = ("_pattern", "types")

    def __init__(self, *types: str) -> None:
        self.types = types
        names = b"|".join(re.escape(name.encode()) for name in types)
        typed = rb'event: ?(?:%s)\r?\n|data: ?\{\s*"type":\s*"(?:%s)"' % (names, names)
        self._pattern = re.compile(rb"\A(?::|%s)" % (typed if types else _ROLE_ALONE))

    def match_all(self, events: bytes) -> bool:
        """Return whether there are events, and all of them are announcements."""
        search = self._pattern.search
        if search(events, 0, _LONGEST_KIND) is None:
            return False
        return all(search(event, 0, _LONGEST_KIND) for event in _split(events) if event.strip())


def _last_end(data: bytes | bytearray, start: int) -> int:
    """Return the position after the last empty line at or after `start`; 0 if there is none."""
    plain = data.rfind(b"\n\n", start)
    with_return = data.rfind(b"\n\r\n", start)
    return max(plain + 2 if plain >= 0 else 0, with_return + 3 if with_return >= 0 else 0)


def _split(events: bytes) -> Iterator[bytes]:
    """Yield single events with their final empty line; empty lines before an event are separate.

    This keeps the bytes that are passed on independent of the event with which they arrived.
    """
    position = 0
    while position < len(events):
        begin = position
        while begin < len(events) and events[begin] in b"\r\n":
            begin += 1
        if begin > position:
            yield events[position:begin]
        found = _EVENT_END.search(events, begin)
        position = found.end() if found is not None else len(events)
        if begin < position:
            yield events[begin:position]


def engine_failure(scanner: StreamScanner) -> UpstreamError:
    """Return the error that an engine reported inside its stream."""
    message_text = scanner.error or ""
    kind = DispatchFailure.LOST if is_dead(message_text) else DispatchFailure.ENGINE_ERROR
    return UpstreamError(kind, f"the engine failed: {message_text}")


def stream_outcome(scanner: StreamScanner) -> Outcome:
    """Return the outcome of a request whose stream is complete."""
    if scanner.error is None:
        return Outcome.COMPLETED
    return Outcome.FAILED if scanner.is_engine_error else Outcome.REJECTED_INVALID


_COMMENT = b": queued\n\n"
_HEADERS: HeaderList = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class QueuedComments:
    """Comments of one stream. Those that a client does not read are replaced by the newest one.

    Args:
        interval_s: time before the first, and silence between them; 0 disables them.
        lines: header lines of the answer, besides its type.

    Attributes:
        begun: a comment was sent, so the answer has begun.
    """

    __slots__ = ("_exchange", "_interval_s", "_lines", "_next", "_stopped", "_timer", "begun")

    def __init__(self, exchange: ClientExchange, interval_s: float, lines: bytes) -> None:
        self._exchange = exchange
        self._interval_s = interval_s
        self._lines = lines
        self._next: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.begun = False

    def start(self) -> None:
        """Start the timer of the first comment."""
        self._arm()

    def on_grant(self) -> None:
        """Handle a grant. Comments continue until the answer begins."""

    def on_fallback(self) -> None:
        """Handle a submission to another model."""

    def on_outlook(self, outlook: RequestOutlook | None) -> None:
        """Handle an outlook. Comments do not state it."""

    def stop(self) -> None:
        """Send no further messages. Idempotent."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._next is not None:
            self._next = self._exchange.on_writable = None

    def send_piece(self, piece: bytes) -> None:
        """Send a comment or an event, as soon as the client reads."""
        if self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        exchange = self._exchange
        if exchange.is_choked:
            self._next, exchange.on_writable = piece, self._send_next
            return
        if not self.begun:
            self.begun = True
            exchange.start_response(200, _HEADERS, self._lines)
        exchange.write_chunk(piece)
        self._arm()

    def _send_next(self) -> None:
        piece, self._next = self._next, None
        self._exchange.on_writable = None
        if piece is not None:
            self.send_piece(piece)

    def _arm(self) -> None:
        if self._interval_s:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.send_piece, _COMMENT)


SUBSCRIBE_AFTER_S = 0.25
"""Delay of the subscription; most requests are dispatched or rejected by then."""


class QueueForm(enum.StrEnum):
    """Format of queue updates."""

    COMMENTS = "comments"
    """Comments, which all clients of server-sent events ignore."""
    EVENTS = "events"
    """Events named `ewsjf.queue`, for clients that support them."""


class QueueUpdates(QueuedComments):
    """Queue updates of one stream, with comments during longer silence.

    Args:
        subscribe: subscribes the request at its scheduler.
    """

    __slots__ = ("_form", "_subscribe", "_subscribing")

    def __init__(
        self,
        exchange: ClientExchange,
        interval_s: float,
        lines: bytes,
        form: QueueForm,
        subscribe: Callable[[], None],
    ) -> None:
        super().__init__(exchange, interval_s, lines)
        self._form = form
        self._subscribe = subscribe
        self._subscribing: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timers of the first comment and of the subscription."""
        super().start()
        self._subscribing = asyncio.get_running_loop().call_later(SUBSCRIBE_AFTER_S, self._subscribe_now)

    def _subscribe_now(self) -> None:
        self._subscribing = None
        self._subscribe()

    def on_fallback(self) -> None:
        """Subscribe at the scheduler of the next model, if it was subscribed at the one before."""
        if self._subscribing is None:
            self._subscribe()

    def on_grant(self) -> None:
        """Send `started` if the client was notified of waiting."""
        if self.begun:
            self.send_piece(_written(self._form, "started", None))

    def on_outlook(self, outlook: RequestOutlook | None) -> None:
        """Send an outlook; None if the scheduler is not connected."""
        state = "scheduler_unavailable" if outlook is None else "waiting"
        self.send_piece(_written(self._form, state, outlook))

    def stop(self) -> None:
        """Send no further messages, and cancel a pending subscription. Idempotent."""
        super().stop()
        if self._subscribing is not None:
            self._subscribing.cancel()


def _written(form: QueueForm, state: str, outlook: RequestOutlook | None) -> bytes:
    fields: dict[str, object] = {"state": state}
    if outlook is not None:
        fields["position"] = outlook.position
        if outlook.expected_s is not None:
            fields["expected_start_s"] = outlook.expected_s
            fields["earliest_s"], fields["latest_s"] = outlook.earliest_s, outlook.latest_s
    if form is QueueForm.EVENTS:
        return b"event: ewsjf.queue\ndata: " + encode(fields) + b"\n\n"
    return (
        b": queue "
        + b" ".join(b"%s=%s" % (key.encode(), str(fields[key]).encode()) for key in fields)
        + b"\n\n"
    )
