import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.events import Cancelled, Finished, Message
from serve_app.errors import ChannelError, Outcome
from serve_app.request import Usage
from serve_app.serving.channel.link import FrameReader, decode_from_peer, encode_frames
from serve_app.serving.channel.messages import FromPeer, Heartbeat, Submit
from tests.serving.channel.harness import submission

LIMIT = 1 << 20


def reader(limit: int = LIMIT) -> FrameReader[FromPeer]:
    return FrameReader(decode_from_peer, limit)


def some_messages(count: int) -> list[Message]:
    return [
        Submit(submission(f"r{n}"), 0.25)
        if n % 3
        else Finished(f"r{n}", Outcome.COMPLETED, Usage(prompt_tokens=n, output_tokens=2))
        for n in range(count)
    ]


@given(count=st.integers(1, 40), cuts=st.lists(st.integers(0, 5000), max_size=8))
def test_messages_arrive_however_the_stream_is_split_or_joined(count: int, cuts: list[int]) -> None:
    messages = some_messages(count)
    stream = b"".join(encode_frames(messages[at : at + 3], LIMIT) for at in range(0, count, 3))
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    cutter = reader()
    read: list[FromPeer] = []
    for start, end in itertools.pairwise(edges):
        for frame in cutter.feed(stream[start:end]):
            read += frame
    assert read == messages


def test_a_stream_may_arrive_byte_by_byte() -> None:
    messages = some_messages(5)
    cutter = reader()
    read = [
        m for byte in encode_frames(messages, LIMIT) for frame in cutter.feed(bytes([byte])) for m in frame
    ]
    assert read == messages


@pytest.mark.parametrize(("count", "limit"), [(1_000, LIMIT), (40, 1_000)], ids=["many", "long"])
def test_messages_are_spread_over_several_frames_in_order(count: int, limit: int) -> None:
    messages = some_messages(count)
    frames = list(reader(limit).feed(encode_frames(messages, limit)))
    assert len(frames) > 1
    assert [message for frame in frames for message in frame] == messages


def test_a_single_message_beyond_the_limit_is_rejected_by_name_and_size() -> None:
    with pytest.raises(ChannelError, match=r"Cancelled message of .* exceeds the frame limit \(max 100\)"):
        encode_frames([Cancelled("x" * 200)], 100)


def test_a_length_beyond_the_limit_is_rejected_before_its_bytes_arrive() -> None:
    with pytest.raises(ChannelError, match="exceeds the limit"):
        list(reader(100).feed(b"GET / HTTP/1.1\r\n"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x01",
        b"\x91\x92\xa7unknown\x01",
        b"\x91\x91\xa6cancel",
        b"\x91\x92\xa6cancel\x07",
        b"\xff" * 50,
    ],
    ids=["nothing", "no msgpack", "no list", "unknown name", "missing field", "wrong type", "rubbish"],
)
def test_bytes_that_are_no_messages_are_rejected(body: bytes) -> None:
    with pytest.raises(ChannelError, match="cannot be decoded"):
        list(reader().feed(len(body).to_bytes(4, "big") + body))


@given(st.binary(max_size=300))
def test_garbage_is_rejected_or_waits_for_more_but_never_passes(garbage: bytes) -> None:
    try:
        read = list(reader(200).feed(garbage))
    except ChannelError:
        return
    for frame in read:
        assert all(isinstance(message, Message) for message in frame)


def test_messages_before_the_garbage_are_still_read() -> None:
    frames = reader().feed(encode_frames([Heartbeat(1)], LIMIT) + b"\xff" * 8)
    assert next(frames) == [Heartbeat(1)]
    with pytest.raises(ChannelError):
        next(frames)


def test_prefix_hashes_of_all_64_bits_cross_the_channel_in_nine_bytes_each() -> None:
    hashes = (0, 2**63, *range(2**64 - 126, 2**64))
    bare, full = (Submit(submission("r1", prefix=prefix), 0.25) for prefix in ((), hashes))
    stream = encode_frames([full], LIMIT)
    assert list(reader().feed(stream)) == [[full]]
    assert len(stream) - len(encode_frames([bare], LIMIT)) <= 9 * len(hashes) + 2
