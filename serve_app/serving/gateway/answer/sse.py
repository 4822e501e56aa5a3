"""The scanner of an engine's event stream: reads the usage, hides what the client did not ask for.

The scanner works on bytes and passes them on as they are. TCP cuts the stream anywhere, so:

- only whole events go on; the beginning of one waits for its rest (a client could do nothing with it
  either, and after a break the error event must not land inside another event);
- a piece that ends with an event and speaks neither of usage nor of an error goes on without a further
  look: nearly all do. JSON escapes quotes inside strings, so the key cannot hide in generated text;
- an event is left out only when it holds usage and no choices, and only when the client did not ask for it.

What the client receives does not depend on where TCP cut the stream.
"""

import re
from collections.abc import Iterator

import msgspec

from serve_app.request import Usage
from serve_app.serving.channel.scheduler_client import EngineTimes
from serve_app.serving.gateway.answer.usage import NO_TIMES, RawUsage, engine_times_of

_EVENT_END = re.compile(rb"\n\r?\n")
_LINE = re.compile(rb"[^\r\n]+")
_LONGEST_KIND = 80
# An event longer than this is not a usage event, and is passed on in parts rather than held.
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
        """OpenAI's errors have a status as their code, Anthropic's only a type."""
        refused = isinstance(self.code, int) and 400 <= self.code < 500
        return not refused and self.type not in _REFUSALS


class _StreamEvent(msgspec.Struct):
    type: str | None = None
    choices: list[msgspec.Raw] | None = None
    usage: RawUsage | None = None
    error: _EngineError | str | None = None
    # A text in an error, and in Anthropic's first event the message that begins.
    message: str | _Response | None = None
    response: _Response | None = None
    metrics: msgspec.Raw = NO_TIMES

    @property
    def counted(self) -> RawUsage | None:
        """The counts, wherever this API puts them."""
        if self.usage is not None:
            return self.usage
        whole = self.response or self.message
        return whole.usage if isinstance(whole, _Response) else None

    @property
    def times(self) -> EngineTimes | None:
        """What the engine tells of the time inside it, beside the counts."""
        return engine_times_of(self.metrics if self.response is None else self.response.metrics)


_decoder = msgspec.json.Decoder(_StreamEvent)
_FAILED_EVENTS = frozenset({"response.failed", "error"})
# Anthropic's types of what is the client's own fault.
_REFUSALS = frozenset({"invalid_request_error", "not_found_error", "request_too_large"})


class StreamScanner:
    """One stream on its way to the client.

    Args:
        hide_usage: leave out the event that carries only usage.

    Attributes:
        usage: the engine's last count, None until it gives one.
        times: what the engine tells of the time inside it, with its last count; None where it does not.
        error: what the engine reported as an error inside the stream, None when all went well.
        error_is_engines: the error is a fault of the engine, not of the request.
    """

    __slots__ = ("_held", "_hide_usage", "error", "error_is_engines", "times", "usage")

    def __init__(self, *, hide_usage: bool) -> None:
        self.usage: Usage | None = None
        self.times: EngineTimes | None = None
        self.error: str | None = None
        self.error_is_engines = False
        self._hide_usage = hide_usage
        self._held = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the engine; returns those that may go to the client now."""
        if not self._held:
            if data.endswith((b"\n\n", b"\n\r\n")):
                return self._inspected(data)
            end = _last_end(data, 0)
            self._held += data[end:]
            return self._inspected(data[:end]) if end else self._relieved()
        # Only the new bytes, and the few before them that may begin the event's end, are searched.
        searched_from = max(0, len(self._held) - 2)
        self._held += data
        end = _last_end(self._held, searched_from)
        if not end:
            return self._relieved()
        whole = bytes(memoryview(self._held)[:end])
        del self._held[:end]
        return self._inspected(whole)

    def flush(self) -> bytes:
        """The engine's stream is complete; returns what was still held."""
        rest = bytes(self._held)
        self._held.clear()
        return self._inspected(rest) if rest else rest

    def _relieved(self) -> bytes:
        """Nothing, or the beginning of an event too long to be held."""
        if len(self._held) <= _MAX_HELD_BYTES:
            return b""
        # The last bytes stay: they may begin the event's end.
        part = bytes(memoryview(self._held)[:-2])
        del self._held[:-2]
        return part

    def _inspected(self, events: bytes) -> bytes:
        if b'"usage"' not in events and b'"error"' not in events:
            return events
        return b"".join([event for event in _split(events) if not self._is_hidden(event)])

    def _is_hidden(self, event: bytes) -> bool:
        """Note what an event says of usage and errors; True when the client must not see it."""
        if b'"usage"' not in event and b'"error"' not in event:
            return False
        data = b"\n".join(line[5:].lstrip(b" ") for line in _LINE.findall(event) if line.startswith(b"data:"))
        try:
            parsed = _decoder.decode(data)
        except (ValueError, RecursionError):
            return False
        self._note_error(parsed)
        usage = parsed.counted
        if usage is None:
            return False
        self.usage = usage.counted(self.usage) or self.usage
        self.times = parsed.times
        return self._hide_usage and parsed.choices == []

    def _note_error(self, event: _StreamEvent) -> None:
        if event.error is None and event.type not in _FAILED_EVENTS:
            return
        error = event.error
        if isinstance(error, _EngineError):
            self.error = error.message or "the engine reported an error"
            self.error_is_engines = error.is_engines
        else:
            said = event.message if isinstance(event.message, str) else None
            self.error = error or said or "the engine reported an error"
            self.error_is_engines = True


class Announcements:
    """The events that only say that an answer is being worked on.

    They begin with their type, as a line of its own or as the first field of their data.
    """

    __slots__ = ("_pattern", "types")

    def __init__(self, *types: str) -> None:
        self.types = types
        names = b"|".join(re.escape(name.encode()) for name in types)
        self._pattern = re.compile(
            rb'\A(?:event: ?(?:%s)\r?\n|data: ?\{\s*"type":\s*"(?:%s)")' % (names, names)
        )

    def are_all(self, events: bytes) -> bool:
        """Whether there are events, and no others than these."""
        search = self._pattern.search
        if search(events, 0, _LONGEST_KIND) is None:
            return False
        return all(search(event, 0, _LONGEST_KIND) for event in _split(events) if event.strip())


def _last_end(data: bytes | bytearray, start: int) -> int:
    """Position after the last empty line at or after `start`; 0 when there is none."""
    plain = data.rfind(b"\n\n", start)
    with_return = data.rfind(b"\n\r\n", start)
    return max(plain + 2 if plain >= 0 else 0, with_return + 3 if with_return >= 0 else 0)


def _split(events: bytes) -> Iterator[bytes]:
    """Single events with the empty line that ends each; empty lines before an event come by themselves.

    Those are apart so that the bytes that go on do not depend on which event they happened to arrive with.
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
