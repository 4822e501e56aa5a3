"""Streamed answers: scanning of events, token usage, and passing on or assembling of the stream.

An answer that is not streamed is silent until its end, so a dead engine looks like a busy one.
Therefore the gateway can request a stream instead, and assemble the answer.

The result equals the engine's own answer, except for what streams lack: null fields, annotations, and vLLM's
`system_fingerprint`. Texts and logprobs of a choice are joined; of all other fields the last value is used.
"""

import asyncio
import re
from collections.abc import Iterator
from time import monotonic
from typing import Any

import msgspec

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from serve_app.request import TurnEnd, Usage
from serve_app.serving.channel.scheduler_client import EngineTimes
from serve_app.serving.gateway.answer.client import ClientExchange
from serve_app.serving.gateway.answer.ending import combined, ending_in, ending_of
from serve_app.serving.gateway.answer.engine_answer import is_dead
from serve_app.serving.gateway.answer.responses import encode
from serve_app.serving.gateway.upstream import UpstreamError, UpstreamResponse, complete
from serve_app.serving.metric_cells import HistogramCell

_KINDS = {"chat.completion.chunk": "chat.completion"}
_DONE = b"[DONE]"
_decoder = msgspec.json.Decoder(dict[str, Any])


class _ChoiceParts:
    """One choice of a completion while it arrives."""

    def __init__(self, index: int) -> None:
        self._fields: dict[str, Any] = {
            "index": index,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        self._texts: dict[str, list[str]] = {}
        self._message: dict[str, Any] | None = None
        self._logprobs: dict[str, list[Any]] | None = None

    @property
    def finish_reason(self) -> str | None:
        """Reason for the end; None before it."""
        reason: str | None = self._fields["finish_reason"]
        return reason

    def add(self, chunk: dict[str, Any]) -> None:
        """Add the choice's part of one event."""
        for name, value in chunk.items():
            if value is None:
                continue
            if name == "delta":
                self._add_delta(value)
            elif name == "text":
                self._texts.setdefault(name, []).append(value)
            elif name == "logprobs":
                self._add_logprobs(value)
            else:
                self._fields[name] = value

    def lengths(self) -> dict[str, int]:
        """Return the number of parts of each text, for `truncate`."""
        return {name: len(parts) for name, parts in self._texts.items()}

    def truncate(self, lengths: dict[str, int]) -> None:
        """Drop the parts of texts that were added after `lengths` was taken, and the end of the choice."""
        self._texts = {name: self._texts[name][:length] for name, length in lengths.items()}
        self._fields |= {"finish_reason": None, "stop_reason": None}

    def whole(self) -> dict[str, Any]:
        """Return the complete choice."""
        fields = {**self._fields, "logprobs": self._logprobs}
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        if self._message is None:
            return {**fields, "text": texts.get("text", "")}
        content = texts.pop("content", None)
        # After reasoning alone, an engine's message has null content, but its stream begins with "".
        content = (content or None) if texts else content
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**fields, "message": {**message, **texts, **self._message}}

    def _add_delta(self, delta: dict[str, Any]) -> None:
        message = self._message = self._message or {}
        for name, value in delta.items():
            if isinstance(value, str) and name != "role":
                self._texts.setdefault(name, []).append(value)
            elif value is not None:
                message[name] = value

    def _add_logprobs(self, logprobs: dict[str, Any]) -> None:
        joined = self._logprobs = self._logprobs or {}
        for name, values in logprobs.items():
            if isinstance(values, list):
                joined.setdefault(name, []).extend(values)


class AnswerAssembly:
    """A chat or text completion while its events arrive."""

    def __init__(self) -> None:
        self._rest = b""
        self._head: dict[str, Any] = {}
        self._usage: Any = None
        self._choices: dict[int, _ChoiceParts] = {}
        # The event with the engine's error, if there was one.
        self.error: bytes | None = None

    @property
    def is_complete(self) -> bool:
        """True if all choices that have begun are complete."""
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices.values())

    def feed(self, events: bytes) -> None:
        """Add the next bytes of the stream.

        Raises:
            UpstreamError: they are not events of a completion.
        """
        *lines, self._rest = (self._rest + events).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data and data != _DONE:
                self._add(data)

    def whole(self) -> bytes:
        """Return the answer as one JSON object.

        Raises:
            UpstreamError: the stream ended before all choices did.
        """
        self._check_complete()
        choices = [self._choices[index] for index in sorted(self._choices)]
        return encode({**self._head, "choices": [choice.whole() for choice in choices], "usage": self._usage})

    def _check_complete(self) -> None:
        if not self.is_complete:
            raise UpstreamError(
                DispatchFailure.LOST, "the engine ended its stream before the answer was complete"
            )

    def _add(self, data: bytes) -> None:
        try:
            chunk = _decoder.decode(data)
            if "error" in chunk and chunk["error"] is not None:
                self.error = data
                return
            self._add_chunk(chunk)
        except (ValueError, RecursionError, TypeError, AttributeError, KeyError) as exc:
            raise UpstreamError(DispatchFailure.LOST, f"the engine's events cannot be read: {exc}") from exc

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        """Add one event."""
        self._usage = chunk.pop("usage", None) or self._usage
        for part in chunk.pop("choices", ()):
            index = part["index"]
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = _ChoiceParts(index)
            choice.add(part)
        if not self._head:
            self._head = {name: value for name, value in chunk.items() if value is not None}
            self._head["object"] = _KINDS.get(chunk.get("object", ""), chunk.get("object"))


# Scanner of an engine's event stream: reads the usage, and hides events that the client did not request.
#
# It works on bytes and passes them on unchanged. TCP may cut the stream anywhere, so:
#
# - Only whole events are passed on. The beginning of an event waits for its rest, because after a failure the
#   error event must not land inside another event.
# - Bytes that end with an event and contain neither usage nor error, nearly all, are passed on unparsed. JSON
#   escapes quotes inside strings, so generated text cannot hide the key.
# - An event is dropped only if it has usage and no choices, and the client did not request it.
#
# The client's bytes therefore do not depend on TCP's segmentation.
#
# `StreamPassing` writes pieces in the callback that delivers them, without waking a task for each. While the
# client does not read, pieces stay in the response's bounded buffer, and TCP slows the engine down.
#
# Token counts and times are read from these fields only:
#
# | answers to           | prompt          | output              | of the prompt, from a cache           |
# |----------------------|-----------------|---------------------|---------------------------------------|
# | chats, completions   | `prompt_tokens` | `completion_tokens` | `prompt_tokens_details.cached_tokens` |
# | Responses            | `input_tokens`  | `output_tokens`     | `input_tokens_details.cached_tokens`  |
# | Messages             | `input_tokens`  | `output_tokens`     | `cache_read_input_tokens`             |
# | embeddings, scores   | `prompt_tokens` |                     |                                       |
# | Cohere's embeddings  | `input_tokens`  |                     |                                       |
#
# Messages count tokens read from and written to a cache separately from `input_tokens`.
# Cohere's have no `usage`; their count is among the billed units in `meta`.
# Times are from vLLM's `metrics`, which needs `enable_per_request_metrics`.


NO_TIMES = msgspec.Raw()
# Larger values are not plausible times of a request.
_LONGEST_MS = 1e9


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class RawUsage(msgspec.Struct, gc=False):
    """The `usage` object of any endpoint."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
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
        beside = self.cache_read_input_tokens or 0
        prompt += beside + (self.cache_creation_input_tokens or 0)
        return Usage(
            prompt_tokens=prompt,
            output_tokens=output or 0,
            cached_tokens=cached or beside,
            ending=ending,
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
    usage: RawUsage | None = None
    meta: _Meta | None = None
    metrics: msgspec.Raw = NO_TIMES


_usage_decoder = msgspec.json.Decoder(_Envelope)


def counts_of(body: bytes) -> tuple[Usage | None, EngineTimes | None]:
    """Return usage and times of a whole answer; each is None if absent, or if the answer is not JSON."""
    try:
        found = _usage_decoder.decode(body)
    except (ValueError, RecursionError):
        return None, None
    raw = found.usage if found.meta is None else found.meta.billed_units
    usage = raw.counted(ending_of(body) if raw.output else None) if raw is not None else None
    return usage, engine_times_of(found.metrics)


def usage_of(body: bytes) -> Usage | None:
    """Return the usage of a whole answer; None if it has none."""
    return counts_of(body)[0]


_EVENT_END = re.compile(rb"\n\r?\n")
# Keys of events that are parsed.
_INSPECTED = re.compile(rb'"(?:usage|error)"')
_LINE = re.compile(rb"[^\r\n]+")
_LONGEST_KIND = 80
# Longer events cannot be usage events, and are passed on in parts.
_MAX_HELD_BYTES = 1024 * 1024


class _Response(msgspec.Struct):
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
        usage: last usage from the engine; None before the first.
        times: stage times that came with it; None if the engine reports none.
        error: error message from inside the stream; None without an error.
        is_engine_error: the error is the engine's fault, not the request's.
    """

    __slots__ = ("_before", "_held", "_hide_usage", "error", "is_engine_error", "times", "usage")

    def __init__(self, *, hide_usage: bool) -> None:
        self.usage: Usage | None = None
        self.times: EngineTimes | None = None
        self.error: str | None = None
        self.is_engine_error = False
        self._hide_usage = hide_usage
        self._held = bytearray()
        # The events before the usage event have the finish reason of a chat.
        self._before = b""

    def feed(self, data: bytes) -> bytes:
        """Add bytes from the engine, and return those that may be sent to the client now."""
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
        self.times = parsed.times
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
    """Matcher for events that announce an answer before any output.

    An event's type is on its first line or in the first field of its data.
    """

    __slots__ = ("_pattern", "types")

    def __init__(self, *types: str) -> None:
        self.types = types
        names = b"|".join(re.escape(name.encode()) for name in types)
        self._pattern = re.compile(
            rb'\A(?:event: ?(?:%s)\r?\n|data: ?\{\s*"type":\s*"(?:%s)")' % (names, names)
        )

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


async def first_events(
    response: UpstreamResponse, scanner: StreamScanner, announced: Announcements | None
) -> bytes:
    """Return the events up to the first that has output.

    Some APIs begin every stream with announcements. Passed on at once, they would commit the client to this
    engine before the prefill, and would count as its first token.
    """
    events = await next_events(response, scanner)
    while announced is not None and announced.match_all(events) and not response.at_end:
        events += await next_events(response, scanner)
    return events


async def next_events(response: UpstreamResponse, scanner: StreamScanner) -> bytes:
    """Return the next events for the client; empty only at the end of the stream."""
    while True:
        events = scanner.feed(await response.next())
        if response.at_end:
            return events + scanner.flush()
        if events:
            return events


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


class StreamPassing:
    """Passing of a stream whose first events have been read; `gaps` records inter-token times. Single use."""

    __slots__ = ("_client", "_ended", "_fault", "_gaps", "_has_room", "_last_at", "_response", "_scanner")

    def __init__(
        self, response: UpstreamResponse, scanner: StreamScanner, client: ClientExchange, gaps: HistogramCell
    ) -> None:
        self._gaps = gaps
        self._last_at = monotonic()
        self._response = response
        self._scanner = scanner
        self._client = client
        self._has_room = True
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fault: Exception | None = None

    async def run(self, events: bytes) -> bytes:
        """Pass on `events` and all further ones, except those that arrive with the end or failure.

        Returns:
            The last events, as soon as the engine has ended, even if the client is still reading.
        """
        response, client = self._response, self._client
        client.on_writable = self._go_on
        self._has_room = client.write_chunk(events)
        response.on_change = self._on_change
        try:
            self._pass_on()
            if not response.has_ended:
                await self._ended
        finally:
            response.on_change = client.on_writable = None
        if self._fault is not None:
            raise self._fault
        return self._scanner.feed(response.take()) + (self._scanner.flush() if response.complete else b"")

    def _on_change(self) -> None:
        """Record the gap, and pass on the pieces that have arrived before the end."""
        if self._response.has_ended:
            complete(self._ended)
        elif self._response.pieces:
            now = monotonic()
            self._gaps.observe(now - self._last_at)
            self._last_at = now
            self._pass_on()

    def _pass_on(self) -> None:
        if not self._has_room or self._response.complete:
            return
        try:
            events = self._scanner.feed(self._response.take())
            if events:
                self._has_room = self._client.write_chunk(events)
        except Exception as error:  # noqa: BLE001 - raised in the task that serves the request
            self._fault = error
            self._response.close()

    def _go_on(self) -> None:
        self._has_room = True
        self._pass_on()
