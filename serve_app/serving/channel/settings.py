"""Settings of the control channel: time limits and capacities."""

from typing import Annotated

from serve_app.core.settings_base import INTERNAL, POSITIVE, at_least, between, settings
from serve_app.serving.tls import TlsSettings


@settings(block="channel")
class ChannelSettings:
    """Times in seconds, sizes in bytes. Both ends of a channel run with the same settings.

    Attributes:
        tls: for connections of the channel and to replicas; plain ones without it.
        port: the first port that schedulers listen on, 0 for any free one.
        ports: how many from there they may use; each model's scheduler takes the first that is free.
        heartbeat_s: each side says that it lives, and what it has read, this often.
        dead_after_s: a peer that says nothing, or reads nothing, for so long is cut off.
        stuck_after_s: the scheduler bears a silent peer for so long whose host still acknowledges what it is
            sent, since its event loop is only busy.
        gateway_grace_s: a gateway that vanished may come back for so long before its requests are released.
        handshake_s: a connection that has not introduced itself by then is closed.
        locate_s: how long the search for the scheduler may take before it starts again; doubles, up to eight
            times this, while searches fail.
        backoff_max_s: longest pause before a lost scheduler is looked for again; it doubles from 0.05 s.
        report_s: a replica looks at its engine's load this often, and reports it when it has changed.
        max_frame_bytes: a longer frame ends the connection.
        max_write_buffer_bytes: a peer with more than this unread ends the connection.
        max_pending_handshakes: connections without an introduction; more are not accepted meanwhile.
        max_waiting_offline: requests that one gateway holds while no scheduler is there to refuse them.
    """

    tls: TlsSettings | None = None
    port: Annotated[int, between(0, 65_535).hint("0 takes any free port")] = 0
    # One per model, and one more for each scheduler that is replaced while its successor begins.
    ports: Annotated[int, at_least(1)] = 16
    # Four a second from each of some dozens of peers costs the scheduler well under one CPU millisecond a
    # second. Four missed beats make the verdict: an event loop that is late once (a long body parsed, a
    # garbage collection) is forgiven, and a machine that lost its power is noticed in dead_after_s.
    heartbeat_s: Annotated[float, POSITIVE, INTERNAL] = 0.25
    # A false alarm costs a reconnect and a snapshot and loses nothing; waiting longer leaves the places of
    # a dead gateway's requests unused for as long.
    dead_after_s: Annotated[float, POSITIVE, INTERNAL] = 1.0
    # No event loop should be occupied for a second; one that is for ten is taken for stopped. Until then
    # what waits at a gateway may be granted places that it does not use.
    stuck_after_s: Annotated[float, POSITIVE, INTERNAL] = 10.0
    # Long enough for a gateway to find the channel again (first tries after 0.05 s). What it has running is
    # charged until the engines say that it has ended.
    gateway_grace_s: Annotated[float, POSITIVE, INTERNAL] = 1.0
    handshake_s: Annotated[float, POSITIVE, INTERNAL] = 1.0
    # A Serve handle waits by itself while the scheduler is being replaced, but a call that went to the dead
    # one may never come back; a new scheduler is up in some four seconds.
    locate_s: Annotated[float, POSITIVE, INTERNAL] = 2.0
    # With some dozens of peers, a start that takes seconds meets at most two tries a second from each.
    backoff_max_s: Annotated[float, POSITIVE, INTERNAL] = 0.5
    report_s: Annotated[float, POSITIVE, INTERNAL] = 0.2
    # A frame carries many messages, but it is split long before this; the largest single message is a
    # submission with its prefix hashes, or the text of the metrics.
    max_frame_bytes: Annotated[int, POSITIVE, INTERNAL] = 4 * 1024 * 1024
    # A snapshot of 20,000 waiting requests takes about 8 MB.
    max_write_buffer_bytes: Annotated[int, POSITIVE, INTERNAL] = 32 * 1024 * 1024
    # 256 strangers cost about 2 MB and a quarter of the time for an introduction; see `listener`.
    max_pending_handshakes: Annotated[int, POSITIVE, INTERNAL] = 256
    max_waiting_offline: Annotated[int, POSITIVE, INTERNAL] = 10_000

    def __post_init__(self) -> None:
        if self.dead_after_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"channel.dead_after_s must be at least two heartbeats, got {self.dead_after_s} with "
                f"heartbeat_s={self.heartbeat_s}: raise the first or lower the second"
            )
        if self.stuck_after_s < self.dead_after_s:
            raise ValueError(
                f"channel.stuck_after_s must not be below dead_after_s, got {self.stuck_after_s} "
                f"with dead_after_s={self.dead_after_s}"
            )

    @property
    def beats_to_death(self) -> int:
        """Heartbeat intervals without a word after which a peer counts as dead."""
        return max(2, round(self.dead_after_s / self.heartbeat_s))

    @property
    def beats_to_stuck(self) -> int:
        """Heartbeat intervals without a word after which a peer counts as stuck."""
        return max(2, round(self.stuck_after_s / self.heartbeat_s))
