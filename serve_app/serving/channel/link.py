"""A link: framing, flow control and heartbeats of one connection on the control channel.

- Messages sent within one iteration of the event loop leave together, in as few frames as possible.
- Each side sends `Heartbeat` every `heartbeat_interval_s`, with the number of messages that it has processed.
  A peer is dead if nothing arrived for `beats_to_death` ticks, or if as many of its heartbeats showed no
  progress in processing: a peer that sends but does not read counts as dead, too.
- A scheduler distinguishes busy peers from dead ones. The kernel of a busy peer still acknowledges
  heartbeats, that of a dead host does not, and the end of a process closes the connection. Acknowledged
  silence is therefore tolerated until `stuck_after_s`, so that no busy gateway loses its capacity.
- Silence is counted in ticks of the local timer, not in seconds. If the local event loop was blocked, data
  that arrived in that time is read before more than one tick has passed, so peers are not blamed for local
  delays.
- A burst of messages is processed in slices, with other work of the loop in between: other peers are served,
  and heartbeats are sent. Until it is processed, nothing more is read from the connection.
- `send` returns the number of the message, and `acknowledged` is the number up to which the peer has
  processed messages. Senders can thus retain what must not be lost.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from serve_app.core.events import Message
from serve_app.errors import ChannelError
from serve_app.serving.channel.messages import (
    VERSION,
    FromPeer,
    FromScheduler,
    Heartbeat,
    to_previous_version,
)
from serve_app.serving.channel.settings import ChannelSettings

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


logger = logging.getLogger("ray.serve")

# `tcpi_last_ack_recv` of Linux' `struct tcp_info`: milliseconds since the last acknowledgement.
_LAST_ACKNOWLEDGEMENT = struct.Struct("@56xI")


class LinkOwner(Protocol):
    """Handler of a link's messages. Both methods are called on the event loop and must not block."""

    def on_link_message(self, link: "Link", message: Any) -> None:
        """Handle a message other than a heartbeat; `ChannelError` ends the connection."""
        ...

    def on_link_lost(self, link: "Link", reason: str) -> None:
        """Handle the end of the connection; called once, as the last call."""
        ...


class Link(asyncio.Protocol):
    """Connection that carries messages and detects dead peers."""

    def __init__(
        self, owner: LinkOwner, decode: Any, settings: ChannelSettings, *, tolerates_busy_peer: bool = False
    ) -> None:
        self._owner = owner
        self._bears_busy_peer = tolerates_busy_peer
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._reader: FrameReader[Any] = FrameReader(decode, settings.max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._outbox: list[Message] = []
        self._flush_due = False
        self._reason = ""
        self.open = False
        # Protocol version of sent messages.
        self.version = VERSION
        # Messages since the connection was made, heartbeats included.
        self._sent = 0
        self._read = 0
        self.acknowledged = 0
        # Whether data arrived since the last tick, and the number of ticks without data.
        self._received = False
        self._silent_ticks = 0
        # Messages sent up to the last heartbeat, and the number of heartbeats without progress.
        self._sent_at_beat = 0
        self._stalled_beats = 0
        # Received frames that have not been processed.
        self._backlog: Iterator[list[Any]] | None = None

    def __repr__(self) -> str:
        state = "open" if self.open else f"closed: {self._reason}"
        return f"<Link {state}, sent {self._sent}, read {self._read}, acknowledged {self.acknowledged}>"

    def limit_frames(self, max_frame_bytes: int) -> None:
        """Limit the length of received frames from now on."""
        self._reader.max_frame_bytes = max_frame_bytes

    def send(self, message: Message) -> int:
        """Send a message at the end of this loop iteration; return its number, or 0 if it cannot be sent."""
        if not self.open:
            return 0
        if self.version < VERSION:
            before = to_previous_version(message)
            if before is None:
                return 0
            message = before
        self._outbox.append(message)
        self._sent += 1
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)
        return self._sent

    def close(self, reason: str) -> None:
        """Send pending messages, then close the connection."""
        if self._transport is None:
            self.abort(reason)
        elif self.open:
            self._flush()
            self._end(reason)
            transport = self._require_transport()
            transport.close()
            # A peer that does not read would keep a closing connection open forever.
            self._loop.call_later(self._settings.dead_after_s, transport.abort)

    def abort(self, reason: str) -> None:
        """Close the connection at once, also while it opens or closes; pending messages are lost."""
        self._outbox.clear()
        if self.open or not self._reason:
            self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def tick(self) -> None:
        """Send a heartbeat, or abort if the peer is dead; called every `heartbeat_interval_s`."""
        if not self.open:
            return
        limit = self._settings.beats_to_death
        self._silent_ticks = 0 if self._received or self._backlog is not None else self._silent_ticks + 1
        self._received = False
        if self._silent_ticks >= limit and not self._is_busy_peer():
            self.abort(
                f"no data from the peer for {self._silent_ticks * self._settings.heartbeat_interval_s:g} s"
            )
            return
        self.send(Heartbeat(self._read))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the link; called by asyncio."""
        self._transport = cast("asyncio.Transport", transport)
        if self._reason:
            # It was aborted while it was opening.
            self._transport.abort()
            return
        self.open = True
        sock = transport.get_extra_info("socket")
        if sock is not None:
            # asyncio sets this itself; without it, each message would take 44 ms.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Process received bytes; called by asyncio."""
        self._received = True
        self._process(self._reader.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the link; called once by asyncio."""
        if self.open:
            self._end(f"the connection broke: {exc}" if exc else "the peer closed the connection")
        self._owner.on_link_lost(self, self._reason)

    # Internals.

    def _is_busy_peer(self) -> bool:
        """Return whether a silent peer may be busy: its host is alive, and the silence is not too long."""
        settings = self._settings
        if not self._bears_busy_peer or self._silent_ticks >= settings.beats_to_stuck:
            return False
        ago_s = acknowledged_ago_s(self._require_transport())
        return ago_s is not None and ago_s < settings.dead_after_s

    def _process(self, frames: Iterator[list[Any]]) -> None:
        """Process a slice of the received frames, and schedule the rest for the next loop iteration."""
        left = MAX_MESSAGES_PER_FRAME
        try:
            for messages in frames:
                for message in messages:
                    if not self.open:
                        return
                    if isinstance(message, Heartbeat):
                        self._note_receipt(message.read)
                    else:
                        self._owner.on_link_message(self, message)
                    # Counted after processing, because a receipt confirms that.
                    self._read += 1
                left -= len(messages)
                if left <= 0:
                    self._pause(frames)
                    return
        except ChannelError as error:
            logger.warning("control channel: closing a connection: %s", error)
            self.abort(str(error))

    def _pause(self, frames: Iterator[list[Any]]) -> None:
        if self.open:
            self._backlog = frames
            self._require_transport().pause_reading()
            self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        frames, self._backlog = self._backlog, None
        if self.open and frames is not None:
            self._process(frames)
            if self.open and self._backlog is None:
                self._require_transport().resume_reading()

    def _note_receipt(self, read: int) -> None:
        if not self.acknowledged <= read <= self._sent:
            raise ChannelError(f"acknowledgement of {read} messages, but only {self._sent} were sent")
        stuck = read == self.acknowledged and read < self._sent_at_beat
        self._stalled_beats = self._stalled_beats + 1 if stuck else 0
        self.acknowledged, self._sent_at_beat = read, self._sent
        if self._stalled_beats >= self._settings.beats_to_death:
            self.abort(f"the peer read nothing in {self._stalled_beats} heartbeats")

    def _flush(self) -> None:
        self._flush_due = False
        if not self._outbox or not self.open:
            return
        outbox, self._outbox = self._outbox, []
        transport = self._require_transport()
        try:
            transport.write(encode_frames(outbox, self._settings.max_frame_bytes))
        except ChannelError as error:
            logger.exception("control channel: cannot send")
            self.abort(str(error))
            return
        unread = transport.get_write_buffer_size()
        if unread > self._settings.max_write_buffer_bytes:
            self.abort(
                f"the peer left {unread:,} bytes unread (max {self._settings.max_write_buffer_bytes:,})"
            )

    def _end(self, reason: str) -> None:
        self.open = False
        self._reason = reason

    def _require_transport(self) -> asyncio.Transport:
        assert self._transport is not None, "a link is open only after connection_made"
        return self._transport


def acknowledged_ago_s(transport: asyncio.BaseTransport) -> float | None:
    """Return the seconds since the peer's host last acknowledged data; None if the system reports none."""
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACKNOWLEDGEMENT.size)
        (milliseconds,) = _LAST_ACKNOWLEDGEMENT.unpack(info)
    except (OSError, struct.error):
        return None
    return float(milliseconds) / 1000
