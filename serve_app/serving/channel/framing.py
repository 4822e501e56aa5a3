"""Framing of the control channel: batches of messages as frames with their length."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from serve_app.core.events import Message
from serve_app.errors import ChannelError
from serve_app.serving.channel.messages import FromPeer, FromScheduler

HEADER_BYTES = 4
# A frame is decoded in one call, so this limits the time that it blocks the event loop, to about 2 ms.
MAX_MESSAGES_PER_FRAME = 256

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
decode_from_peer = msgspec.msgpack.Decoder(list[FromPeer]).decode
decode_from_scheduler = msgspec.msgpack.Decoder(list[FromScheduler]).decode


def encode_frames(messages: Sequence[Message], max_frame_bytes: int) -> bytes:
    """Encode messages as one or more frames, in order.

    Raises:
        ChannelError: a single message exceeds the frame limit.
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
    """Decoder of a byte stream into the messages of its frames."""

    def __init__(self, decode: Any, max_frame_bytes: int) -> None:
        self._decode = decode
        self._partial = bytearray()
        self.max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> Iterator[list[M]]:
        """Yield the messages of each frame that `data` completes.

        The iterator must be exhausted before the next call, unless the connection is closed.

        Raises:
            ChannelError: the bytes are not frames of messages.
        """
        chunk: bytes | bytearray = data
        if self._partial:
            self._partial += data
            chunk = self._partial
        start, end = 0, len(chunk)
        while (body_at := start + HEADER_BYTES) <= end:
            size = int.from_bytes(chunk[start:body_at], "big")
            if size > self.max_frame_bytes:
                limit = self.max_frame_bytes
                raise ChannelError(f"a frame of {size:,} bytes exceeds the limit (max {limit:,})")
            if body_at + size > end:
                break
            start = body_at + size
            try:
                messages: list[M] = self._decode(chunk[body_at:start])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ChannelError(f"a frame of {size:,} bytes cannot be decoded: {error}") from error
            yield messages
        self._partial = bytearray(chunk[start:]) if start or chunk is data else self._partial
