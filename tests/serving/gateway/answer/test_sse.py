"""SSE scanner: the result must not depend on where TCP splits the stream."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.request import Usage
from serve_app.serving.gateway.answer import stream as sse
from serve_app.serving.gateway.answer.stream import Announcements, StreamScanner

BEGINNING = Announcements("response.created", "response.in_progress")
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


def event(document: object, end: str = "\n") -> bytes:
    return f"data: {json.dumps(document)}{end}{end}".encode()


def scan(stream: bytes, cuts: list[int], *, hide_usage: bool = True) -> tuple[bytes, StreamScanner]:
    scanner = StreamScanner(hide_usage=hide_usage)
    positions = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    received = b"".join(scanner.feed(stream[begin:end]) for begin, end in itertools.pairwise(positions))
    return received + scanner.flush(), scanner


content = st.text(alphabet=st.sampled_from('ab"\\{}[]:,\n\r usage"errordata'), max_size=30)
chunks = st.builds(
    lambda text, usage: {"choices": [{"delta": {"content": text}}], **({"usage": None} if usage else {})},
    content,
    st.booleans(),
)
kinds = st.one_of(
    chunks.map(event),
    chunks.map(lambda chunk: event(chunk, "\r\n")),
    st.just(b': a comment with "usage" in it\n\n'),
    st.just(b"\n"),
    st.just(b"\r\n"),
    st.just(b'event: error\ndata: {"error"\n\n'),
    st.just(b'data: "usage"\n\n'),
)


@given(
    st.lists(kinds, max_size=8),
    st.lists(kinds, max_size=4),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(min_value=0), max_size=12),
)
def test_any_cut_of_the_stream_gives_the_same_client_bytes(
    before: list[bytes], after: list[bytes], end: str, cuts: list[int]
) -> None:
    usage_event = event({"choices": [], "usage": USAGE}, end)
    stream = b"".join(before) + usage_event + b"".join(after) + b"data: [DONE]\n\n"
    received, scanner = scan(stream, cuts)
    assert received == b"".join(before) + b"".join(after) + b"data: [DONE]\n\n"
    assert scanner.usage == Usage(prompt_tokens=7, output_tokens=2)


@given(st.binary(max_size=200), st.lists(st.integers(min_value=0), max_size=12))
def test_bytes_that_hold_no_usage_event_pass_unchanged(noise: bytes, cuts: list[int]) -> None:
    received, _ = scan(noise, cuts)
    assert received == noise


def test_every_single_byte_cut_passes_whole_events_only() -> None:
    stream = event({"choices": [{"delta": {"content": "a"}}]}) + event({"choices": [], "usage": USAGE})
    scanner = StreamScanner(hide_usage=True)
    pieces = [scanner.feed(stream[place : place + 1]) for place in range(len(stream))]
    assert [piece for piece in pieces if piece] == [event({"choices": [{"delta": {"content": "a"}}]})]
    assert scanner.flush() == b""


def test_continuous_usage_beside_choices_is_read_and_passed() -> None:
    stream = event({"choices": [{"delta": {}}], "usage": USAGE})
    received, scanner = scan(stream, [5])
    assert received == stream
    assert scanner.usage == Usage(prompt_tokens=7, output_tokens=2)


@pytest.mark.parametrize(
    ("document", "engines"),
    [
        ({"error": {"message": "boom", "code": 500}}, True),
        ({"error": {"message": "boom", "code": 400}}, False),
        ({"error": {"message": "boom"}}, True),
        ({"type": "error", "message": "boom"}, True),
        ({"error": "boom"}, True),
    ],
)
def test_an_error_inside_the_stream_is_noticed(document: object, engines: bool) -> None:
    received, scanner = scan(event(document), [3])
    assert received == event(document)
    assert scanner.error == "boom"
    assert scanner.is_engine_error is engines


def test_words_about_errors_in_generated_text_are_not_errors() -> None:
    stream = event({"choices": [{"delta": {"content": '{"error": "no"} and "usage"'}}], "error": None})
    received, scanner = scan(stream, [])
    assert received == stream
    assert scanner.error is None


def test_an_event_without_end_is_not_held_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_MAX_HELD_BYTES", 1000)
    scanner = StreamScanner(hide_usage=True)
    stream = b"data: " + b"x" * 5000 + b"\n\n" + event({"choices": [], "usage": USAGE})
    received = b""
    for place in range(0, len(stream), 100):
        received += scanner.feed(stream[place : place + 100])
        assert place + 100 - len(received) <= 1100
    assert received + scanner.flush() == b"data: " + b"x" * 5000 + b"\n\n"
    assert scanner.usage is not None


def typed(kind: str, *, named: bool = True) -> bytes:
    line = f"event: {kind}\n" if named else ""
    return line.encode() + event({"type": kind, "response": {"output": "response.completed"}})


@pytest.mark.parametrize("named", [True, False])
def test_events_that_announce_a_response_are_distinguished_from_its_content(named: bool) -> None:
    created, running = (
        typed("response.created", named=named),
        typed("response.in_progress", named=named),
    )
    assert BEGINNING.match_all(created)
    assert BEGINNING.match_all(created + running)
    assert not BEGINNING.match_all(created + typed("response.output_item.added", named=named))
    assert not BEGINNING.match_all(typed("response.completed", named=named))
    assert not BEGINNING.match_all(event({"choices": [{"delta": {"content": "response.created"}}]}))
    assert not BEGINNING.match_all(b"")


ROLE = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def test_a_role_without_content_and_a_comment_announce_a_chat() -> None:
    chat = Announcements()
    role = event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [ROLE]})
    first = event({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "Hi"}}]})
    assert chat.match_all(role)
    assert chat.match_all(b": PROCESSING\n\n" + role)
    assert chat.match_all(role + event({"choices": [ROLE], "usage": None}))
    assert not chat.match_all(role + first)
    assert not chat.match_all(first)
    assert not chat.match_all(b"")
    for delta in (
        {"role": "assistant", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"index": 0}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm"},
    ):
        assert not chat.match_all(event({"choices": [{**ROLE, "delta": delta}]}))
    # An answer without a token has ended.
    assert not chat.match_all(event({"choices": [{**ROLE, "finish_reason": "stop"}]}))
