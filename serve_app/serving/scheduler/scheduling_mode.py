"""The share of the traffic that is scheduled, and the latencies of both parts.

Time to first token is measured from arrival at the gateway; only streamed answers have one.
"""

from collections import deque
from typing import Any, Protocol

from serve_app.core import Scheduler
from serve_app.core.events import ActiveShareChanged, Event, FirstToken
from serve_app.core.metrics.summary import first_token_figures
from serve_app.errors import ChannelError, SettingsError
from serve_app.serving.scheduler.journal import Entry

# Samples of each part: at 20 requests/s, more than the last three minutes. About 300 kB.
_KEPT = 4_000


class ModeScheduler(Protocol):
    """Interface of the live scheduler that this module uses."""

    core: Scheduler
    end_reason: str

    def feed(self, event: Event) -> None:
        """Handle an event in the core."""
        ...


class SchedulingMode:
    """Scheduled share, and the recent times to first token of both parts.

    Without cost while everything is scheduled.
    """

    def __init__(self, scheduler: ModeScheduler) -> None:
        self._scheduler = scheduler
        self._firsts: dict[bool, deque[tuple[int, float]]] = {
            bypassed: deque(maxlen=_KEPT) for bypassed in (False, True)
        }

    def __repr__(self) -> str:
        return f"<SchedulingMode active_share={self.active_share:g}>"

    @property
    def active_share(self) -> float:
        """Share of the requests that is scheduled, from 0 to 1."""
        return self._scheduler.core.pass_through.active_share

    @property
    def obstacle(self) -> str:
        """Reason that scheduling cannot be measured now; empty while all requests are scheduled."""
        share = self.active_share
        return "" if share == 1 else f"{1 - share:.0%} of the requests are not scheduled (mode)"

    def change(self, active_share: float) -> None:
        """Change the scheduled share.

        Raises:
            SettingsError: the share is not from 0 to 1.
            ChannelError: this scheduler has ended.
        """
        if not 0 <= active_share <= 1:
            raise SettingsError(f"active_share must be from 0 to 1, got {active_share!r}")
        self._scheduler.feed(ActiveShareChanged(active_share))
        if self._scheduler.end_reason:
            raise ChannelError(f"this scheduler is not running: {self._scheduler.end_reason}")

    def on_entry(self, entry: Entry) -> None:
        """Record a first token while part of the traffic is not scheduled."""
        scheduled = entry.scheduled
        if not isinstance(entry.event, FirstToken) or scheduled is None or self.active_share == 1:
            return
        # A gateway that reconnects may repeat a first token.
        if scheduled.started_at == entry.now:
            waited_s = entry.now - scheduled.request.arrived_at
            self._firsts[scheduled.bypassed].append((scheduled.estimate.expected_prompt_tokens, waited_s))

    def describe(self) -> dict[str, Any]:
        """Return the share, and the times to first token of both parts."""
        share = self.active_share
        return {
            "mode": "active" if share == 1 else "observe" if share == 0 else "partly active",
            "active_share": share,
            "measured": {
                "scheduled": first_token_figures(self._firsts[False]),
                "bypassed": first_token_figures(self._firsts[True]),
            },
        }
