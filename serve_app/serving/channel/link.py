"""A link: framing, flow control and heartbeats of one connection on the control channel.

- Messages sent within one turn of the event loop leave together, in as few frames as possible.
- Each side says `Heartbeat` every `heartbeat_s`, with the count of messages that it has dealt with. A peer is
  dead when nothing was heard from it for `beats_to_death` ticks, or when as many of its heartbeats brought no
  news that it deals with what it was sent: who talks and does not listen is as useless as who is silent.
- A scheduler tells a busy peer from a dead one. While a peer's event loop is occupied, its kernel goes on to
  acknowledge our heartbeats; that of a dead host does not, and the end of a process ends its connection. So
  silence that is acknowledged is borne until `stuck_after_s`, and no busy gateway loses its places.
- Silence is counted in ticks of our own timer, not in seconds: when this event loop itself was away, the
  data that came meanwhile is read before more than one tick has passed, so nobody is blamed for our delay.
- A peer that says much at once is heard in slices, between which the loop does everything else: other peers
  are not kept waiting, and our own heartbeats go out. Meanwhile nothing more is read from its connection.
- Receipts let a sender keep what it cannot afford to lose until the other side has dealt with it: `send`
  returns the number of the message, `acknowledged` the number up to which all are dealt with.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from serve_app.errors import ChannelError
from serve_app.serving.channel.messages import VERSION, FromPeer, FromScheduler, Heartbeat, Message, as_before
from serve_app.serving.channel.settings import ChannelSettings

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


logger = logging.getLogger("ray.serve")

# `tcpi_last_ack_recv` of Linux' `struct tcp_info`: milliseconds since the last acknowledgement.
_LAST_ACKNOWLEDGEMENT = struct.Struct("@56xI")


class LinkOwner(Protocol):
    """Who hears what comes over a link. Both methods are called on the event loop and must not block."""

    def on_link_message(self, link: "Link", message: Any) -> None:
        """Take one message other than a heartbeat; `ChannelError` ends the connection."""
        ...

    def on_link_lost(self, link: "Link", reason: str) -> None:
        """The connection is over; called once, and nothing is said after it."""
        ...


class Link(asyncio.Protocol):
    """A connection that carries messages, and knows whether anybody lives at its far end."""

    def __init__(
        self, owner: LinkOwner, decode: Any, settings: ChannelSettings, *, bears_busy_peer: bool = False
    ) -> None:
        self._owner = owner
        self._bears_busy_peer = bears_busy_peer
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._reader: FrameReader[Any] = FrameReader(decode, settings.max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._outbox: list[Message] = []
        self._flush_due = False
        self._reason = ""
        self.open = False
        # Of the protocol, for what is sent.
        self.version = VERSION
        # Messages counted since the connection was made, heartbeats included.
        self._sent = 0
        self._read = 0
        self.acknowledged = 0
        # Since the last tick.
        self._heard = False
        self._silent_ticks = 0
        # How much had been sent when the last heartbeat came, and how many have come without progress.
        self._sent_at_beat = 0
        self._deaf_beats = 0
        # What has been received and not been dealt with.
        self._backlog: Iterator[list[Any]] | None = None

    def __repr__(self) -> str:
        state = "open" if self.open else f"closed: {self._reason}"
        return f"<Link {state}, sent {self._sent}, read {self._read}, acknowledged {self.acknowledged}>"

    def limit_frames(self, max_frame_bytes: int) -> None:
        """Accept frames of at most so many bytes from now on."""
        self._reader.max_frame_bytes = max_frame_bytes

    def send(self, message: Message) -> int:
        """Send the message at the end of this turn of the loop; return its number, 0 on a closed link."""
        if not self.open:
            return 0
        if self.version < VERSION:
            before = as_before(message)
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
        """Send what is waiting to be sent, then end the connection."""
        if self._transport is None:
            self.abort(reason)
        elif self.open:
            self._flush()
            self._end(reason)
            transport = self._require_transport()
            transport.close()
            # A peer that does not read would keep a closing connection open for ever.
            self._loop.call_later(self._settings.dead_after_s, transport.abort)

    def abort(self, reason: str) -> None:
        """End the connection at once, also one that is still being made or closed; unsent words are lost."""
        self._outbox.clear()
        if self.open or not self._reason:
            self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def tick(self) -> None:
        """Say that we live, and give a dead peer up; the owner calls it every `heartbeat_s`."""
        if not self.open:
            return
        limit = self._settings.beats_to_death
        self._silent_ticks = 0 if self._heard or self._backlog is not None else self._silent_ticks + 1
        self._heard = False
        if self._silent_ticks >= limit and not self._is_busy_peer():
            self.abort(f"the peer said nothing for {self._silent_ticks * self._settings.heartbeat_s:g} s")
            return
        self.send(Heartbeat(self._read))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; asyncio calls this."""
        self._transport = cast("asyncio.Transport", transport)
        if self._reason:
            # It was ended while it was being made.
            self._transport.abort()
            return
        self.open = True
        sock = transport.get_extra_info("socket")
        if sock is not None:
            # asyncio sets this by itself; 44 ms per message where it is missing is reason enough to insist.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Take what the peer said; asyncio calls this."""
        self._heard = True
        self._hear(self._reader.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        """End; asyncio calls this once, whoever ended it."""
        if self.open:
            self._end(f"the connection broke: {exc}" if exc else "the peer closed the connection")
        self._owner.on_link_lost(self, self._reason)

    # How it works.

    def _is_busy_peer(self) -> bool:
        """Whether the silent peer may be busy: its host lives, and it has not been silent for too long."""
        settings = self._settings
        if not self._bears_busy_peer or self._silent_ticks >= settings.beats_to_stuck:
            return False
        ago_s = acknowledged_ago_s(self._require_transport())
        return ago_s is not None and ago_s < settings.dead_after_s

    def _hear(self, frames: Iterator[list[Any]]) -> None:
        """Deal with a slice of what came; go on with the rest at the loop's next turn."""
        left = MAX_MESSAGES_PER_FRAME
        try:
            for messages in frames:
                for message in messages:
                    if not self.open:
                        return
                    self._take(message)
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
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        frames, self._backlog = self._backlog, None
        if self.open and frames is not None:
            self._hear(frames)
            if self.open and self._backlog is None:
                self._require_transport().resume_reading()

    def _take(self, message: Any) -> None:
        if isinstance(message, Heartbeat):
            self._note_receipt(message.read)
        else:
            self._owner.on_link_message(self, message)
        # Counted after it was dealt with: a receipt promises that much.
        self._read += 1

    def _note_receipt(self, read: int) -> None:
        if not self.acknowledged <= read <= self._sent:
            raise ChannelError(f"a receipt for {read} messages, when {self._sent} were sent")
        stuck = read == self.acknowledged and read < self._sent_at_beat
        self._deaf_beats = self._deaf_beats + 1 if stuck else 0
        self.acknowledged, self._sent_at_beat = read, self._sent
        if self._deaf_beats >= self._settings.beats_to_death:
            self.abort(f"the peer read nothing in {self._deaf_beats} heartbeats")

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
    """Seconds since the peer's host acknowledged something; None where the system does not tell."""
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACKNOWLEDGEMENT.size)
        (milliseconds,) = _LAST_ACKNOWLEDGEMENT.unpack(info)
    except (OSError, struct.error):
        return None
    return float(milliseconds) / 1000
