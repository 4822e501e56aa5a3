"""Settings of the control channel: time limits and capacities."""

from typing import Annotated

from serve_app.core.settings_base import INTERNAL, POSITIVE, at_least, between, settings
from serve_app.serving.tls import TlsSettings


@settings(block="channel")
class ChannelSettings:
    """Control channel. Times in seconds, sizes in bytes; both ends use the same settings.

    Attributes:
        tls: TLS of the channel and of connections to replicas; null disables it.
        port: first port for schedulers; 0 for any free one.
        ports: number of ports from there; each model's scheduler uses the first free one.
        heartbeat_interval_s: interval of heartbeats, which also acknowledge messages.
        dead_after_s: a peer that sends nothing, or processes nothing, for this long is disconnected.
        stuck_after_s: the scheduler tolerates a silent peer for this long if its host still acknowledges
            data, because only its event loop is busy.
        gateway_grace_s: time in which a lost gateway may reconnect before its requests are released.
        handshake_timeout_s: time limit of a handshake.
        locate_timeout_s: time limit of a search for the scheduler; doubles up to eightfold on failures.
        backoff_max_s: longest pause before a reconnect; pauses double from 0.05 s.
        report_interval_s: interval at which a replica checks its engine's load, which it reports on change.
        max_frame_bytes: a longer frame ends the connection.
        max_write_buffer_bytes: more unread data than this ends the connection.
        max_pending_handshakes: connections before their handshake; at the limit, no more are accepted.
        max_queued_disconnected: requests that one gateway holds while no scheduler is connected.
    """

    tls: TlsSettings | None = None
    port: Annotated[int, between(0, 65_535).hint("0 takes any free port")] = 0
    # One per model, and one more for each scheduler whose successor starts while it still runs.
    ports: Annotated[int, at_least(1)] = 16
    # Four heartbeats per second from dozens of peers cost the scheduler well under 1 ms of CPU time per
    # second. Four missed ones are needed to disconnect, so a delay of the event loop (a long body, a garbage
    # collection) is tolerated, and a machine without power is detected in `dead_after_s`.
    heartbeat_interval_s: Annotated[float, POSITIVE, INTERNAL] = 0.25
    # A false alarm costs a reconnect and a snapshot, but no request. A larger value leaves the capacity of a
    # dead gateway's requests unused for longer.
    dead_after_s: Annotated[float, POSITIVE, INTERNAL] = 1.0
    # No event loop should block for a second; one that blocks for ten counts as stopped. Until then, requests
    # of a busy gateway may be granted capacity that they do not use.
    stuck_after_s: Annotated[float, POSITIVE, INTERNAL] = 10.0
    # Enough for a gateway to reconnect (first attempts after 0.05 s). Its running requests keep their holds
    # until the engines report their end.
    gateway_grace_s: Annotated[float, POSITIVE, INTERNAL] = 1.0
    handshake_timeout_s: Annotated[float, POSITIVE, INTERNAL] = 1.0
    # A Serve handle waits while the scheduler is replaced, but a call to the dead one may never return. A new
    # scheduler is up in about four seconds.
    locate_timeout_s: Annotated[float, POSITIVE, INTERNAL] = 2.0
    # With dozens of peers, a starting scheduler receives at most about two attempts per second of each.
    backoff_max_s: Annotated[float, POSITIVE, INTERNAL] = 0.5
    report_interval_s: Annotated[float, POSITIVE, INTERNAL] = 0.2
    # Batches are split long before this limit. The largest single messages are submissions with prefix
    # hashes, and the text of metrics.
    max_frame_bytes: Annotated[int, POSITIVE, INTERNAL] = 4 * 1024 * 1024
    # A snapshot of 20,000 waiting requests needs about 8 MB.
    max_write_buffer_bytes: Annotated[int, POSITIVE, INTERNAL] = 32 * 1024 * 1024
    # 256 pending connections cost about 2 MB, and leave a quarter of the time for a handshake.
    max_pending_handshakes: Annotated[int, POSITIVE, INTERNAL] = 256
    max_queued_disconnected: Annotated[int, POSITIVE, INTERNAL] = 10_000

    def __post_init__(self) -> None:
        if self.dead_after_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"channel.dead_after_s must be at least two heartbeats, got {self.dead_after_s} with "
                f"heartbeat_interval_s={self.heartbeat_interval_s}: raise the first or lower the second"
            )
        if self.stuck_after_s < self.dead_after_s:
            raise ValueError(
                f"channel.stuck_after_s must not be below dead_after_s, got {self.stuck_after_s} "
                f"with dead_after_s={self.dead_after_s}"
            )

    @property
    def beats_to_death(self) -> int:
        """Heartbeat intervals of silence after which a peer counts as dead."""
        return max(2, round(self.dead_after_s / self.heartbeat_interval_s))

    @property
    def beats_to_stuck(self) -> int:
        """Heartbeat intervals of silence after which a peer counts as stuck."""
        return max(2, round(self.stuck_after_s / self.heartbeat_interval_s))
