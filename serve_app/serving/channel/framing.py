"""Frames of the control channel: messages to bytes and back.

A frame is four bytes of length, most significant first, and so many bytes of msgpack: an array of messages.
The reader trusts nothing: a length beyond the limit, or bytes that are not messages of the expected
union, raise `ChannelError`, after which the connection is of no more use.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from serve_app.errors import ChannelError
from serve_app.serving.channel.messages import FromPeer, FromScheduler, Message

HEADER_BYTES = 4
# A frame is decoded in one go, so this bounds how long the event loop is away for one of them, about 2 ms.
MAX_MESSAGES_PER_FRAME = 256

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
decode_from_peer = msgspec.msgpack.Decoder(list[FromPeer]).decode
decode_from_scheduler = msgspec.msgpack.Decoder(list[FromScheduler]).decode


def encode_frames(messages: Sequence[Message], max_frame_bytes: int) -> bytes:
    """Return the messages as one or more frames, in order.

    Raises:
        ChannelError: a single message is longer than a frame may be.
    """
    if len(messages) > MAX_MESSAGES_PER_FRAME:
        return b"".join(
            encode_frames(messages[at : at + MAX_MESSAGES_PER_FRAME], max_frame_bytes)
            for at in range(0, len(messages), MAX_MESSAGES_PER_FRAME)
        )
    body = _encoder.encode(messages)
    if len(body) <= max_frame_bytes:
        return len(body).to_bytes(HEADER_BYTES, "big") + body
    if len(messages) == 1:
        raise ChannelError(
            f"a {type(messages[0]).__name__} message of {len(body):,} bytes exceeds the frame limit "
            f"(max {max_frame_bytes:,}): raise channel.max_frame_bytes"
        )
    middle = len(messages) // 2
    return encode_frames(messages[:middle], max_frame_bytes) + encode_frames(
        messages[middle:], max_frame_bytes
    )


class FrameReader(Generic[M]):
    """Cuts a byte stream into frames, however the network has split or joined them."""

    def __init__(self, decode: Any, max_frame_bytes: int) -> None:
        self._decode = decode
        self._partial = bytearray()
        self.max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> Iterator[list[M]]:
        """Yield the messages of each frame that `data` completes.

        The caller runs the iterator to its end before it feeds again, unless it gives the connection up.

        Raises:
            ChannelError: the bytes are not frames of messages.
        """
        chunk: bytes | bytearray = data
        if self._partial:
            self._partial += data
            chunk = self._partial
        start = 0
        while (body := self._body(chunk, start)) is not None:
            start += HEADER_BYTES + len(body)
            yield self._messages(body)
        self._partial = bytearray(chunk[start:]) if start or chunk is data else self._partial

    def _body(self, chunk: bytes | bytearray, start: int) -> bytes | None:
        """Return the body of the frame that begins at `start`, None while it is not all there."""
        body_at = start + HEADER_BYTES
        if len(chunk) < body_at:
            return None
        size = int.from_bytes(chunk[start:body_at], "big")
        if size > self.max_frame_bytes:
            raise ChannelError(f"a frame of {size:,} bytes exceeds the limit (max {self.max_frame_bytes:,})")
        if len(chunk) < body_at + size:
            return None
        return bytes(chunk[body_at : body_at + size])

    def _messages(self, body: bytes) -> list[M]:
        try:
            messages: list[M] = self._decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ChannelError(f"a frame of {len(body):,} bytes holds no messages: {error}") from error
        return messages
