"""The share of the traffic that is scheduled, and the latencies before and after each change of it.

A window lasts from one change to the next. Time to first token is measured from arrival at the gateway; only
streamed answers have one.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from time import time
from typing import Any, Protocol

from serve_app.core import Scheduler
from serve_app.core.events import ActiveShareChanged, Event, FirstToken
from serve_app.core.metrics.summary import first_token_figures
from serve_app.errors import ChannelError, SettingsError
from serve_app.serving.scheduler.journal import Entry

# Windows, and samples of each part: at 20 requests/s, more than the last three minutes of it. About 5 MB.
_MAX_WINDOWS, _MAX_SAMPLES = 8, 4_000
# Expected prompt tokens, and seconds.
_Samples = deque[tuple[int, float]]


def _no_samples() -> _Samples:
    return deque(maxlen=_MAX_SAMPLES)


@dataclass(slots=True)
class _Window:
    """Time with one share; times in Unix seconds."""

    active_share: float
    since: float
    until: float | None = None
    scheduled: _Samples = field(default_factory=_no_samples)
    bypassed: _Samples = field(default_factory=_no_samples)

    def describe(self) -> dict[str, Any]:
        return {
            "mode": _mode(self.active_share),
            "active_share": self.active_share,
            "since": self.since,
            "until": self.until,
            "scheduled": first_token_figures(self.scheduled),
            "bypassed": first_token_figures(self.bypassed),
        }


def _mode(active_share: float) -> str:
    return "active" if active_share == 1 else "observe" if active_share == 0 else "partly active"


class ModeScheduler(Protocol):
    """Interface of the live scheduler that this module uses."""

    core: Scheduler
    end_reason: str

    def feed(self, event: Event) -> None:
        """Handle an event in the core."""
        ...


class SchedulingMode:
    """Scheduled share, and the times to first token in the windows of the last shares."""

    def __init__(self, scheduler: ModeScheduler) -> None:
        self._scheduler = scheduler
        self._windows = deque([_Window(self.active_share, time())], _MAX_WINDOWS)

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
        if active_share != self._windows[-1].active_share:
            now = self._windows[-1].until = time()
            self._windows.append(_Window(active_share, now))

    def handlers(self) -> Mapping[type, Callable[..., None]]:
        """Return the handler of first tokens."""
        return {FirstToken: self._on_first_token}

    def _on_first_token(self, entry: Entry) -> None:
        scheduled = entry.scheduled
        # A gateway that reconnects may repeat a first token.
        if scheduled is not None and scheduled.started_at == entry.now:
            window, waited_s = self._windows[-1], entry.now - scheduled.request.arrived_at
            part = window.bypassed if scheduled.bypassed else window.scheduled
            part.append((scheduled.estimate.expected_prompt_tokens, waited_s))

    def describe(self) -> dict[str, Any]:
        """Return the share, and the times to first token of both parts.

        `measured` is of all windows in which a part of the traffic was not scheduled.
        """
        split = [window for window in self._windows if window.active_share < 1]
        return {
            "mode": _mode(self.active_share),
            "active_share": self.active_share,
            "measured": {
                "scheduled": first_token_figures(chain(*(window.scheduled for window in split))),
                "bypassed": first_token_figures(chain(*(window.bypassed for window in split))),
            },
            "windows": [window.describe() for window in self._windows],
        }
