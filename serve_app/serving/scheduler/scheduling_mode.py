"""The share of the traffic that is scheduled, and the latencies before and after each change of it.

A window lasts from one change to the next. Time to first token is measured from arrival at the gateway; only
streamed answers have one.

After an observation the share rises in steps. At each step, the scheduled requests are compared with those
that bypass the scheduler at the same time; at the last one, with those of the step before. If their first
tokens are slower, and not by chance, the step is undone, and tried again after a pause that doubles.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from time import time
from typing import Any, Protocol

from serve_app.core import Scheduler
from serve_app.core.events import ActiveShareChanged, Event, FirstToken
from serve_app.core.metrics.summary import first_token_figures
from serve_app.core.routing.observed import compare_kinds
from serve_app.errors import ChannelError, SettingsError
from serve_app.serving.scheduler.journal import Entry

# Windows, and samples of each part: at 20 requests/s, more than the last three minutes of it. About 5 MB.
_MAX_WINDOWS, _MAX_SAMPLES = 8, 4_000
# Expected prompt tokens, and seconds.
_Samples = deque[tuple[int, float]]
# Shares at which a rise stops, and for how many scheduled requests and seconds at least.
_STEPS, _STEP_REQUESTS, _STEP_S = (0.1, 0.25, 0.5, 1.0), 40, 10.0
# The same number of observed requests makes a comparison possible. Slower is beyond chance, and by this much.
_SLOWER_DEVIATIONS, _SLOWER_RATIO = 2.5, 1.1
_FIRST_PAUSE_S, _MAX_PAUSE_S = 60.0, 3_600.0

logger = logging.getLogger("ray.serve")


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
    """Scheduled share, and the times to first token in the windows of the last shares.

    Attributes:
        target_share: the share that is reached in steps.
    """

    def __init__(self, scheduler: ModeScheduler) -> None:
        self._scheduler = scheduler
        self._windows = deque([_Window(self.active_share, time())], _MAX_WINDOWS)
        self.target_share = self.active_share
        # Bypassing requests to compare with, and whether the last step is still compared.
        self._observed: _Samples = _no_samples()
        self._is_judged = True
        self._pause_s, self._resume_at = _FIRST_PAUSE_S, 0.0

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
        """Change the scheduled share, in steps if there is an observation to compare with.

        Raises:
            SettingsError: the share is not from 0 to 1.
            ChannelError: this scheduler has ended.
        """
        if not 0 <= active_share <= 1:
            raise SettingsError(f"active_share must be from 0 to 1, got {active_share!r}")
        self.target_share, self._pause_s, self._resume_at = active_share, _FIRST_PAUSE_S, 0.0
        self._observed = self._windows[-1].bypassed
        self._is_judged = len(self._observed) < _STEP_REQUESTS or active_share < self.active_share
        self._set(active_share if self._is_judged else self._next_share)

    @property
    def _next_share(self) -> float:
        """The next step towards the target."""
        return min(self.target_share, next(step for step in _STEPS if step > self.active_share))

    def _set(self, active_share: float) -> None:
        self._scheduler.feed(ActiveShareChanged(active_share))
        if self._scheduler.end_reason:
            raise ChannelError(f"this scheduler is not running: {self._scheduler.end_reason}")
        if active_share != self._windows[-1].active_share:
            now = self._windows[-1].until = time()
            self._windows.append(_Window(active_share, now))

    def _judge(self, window: _Window) -> None:
        """Go on to the next step, or undo this one, once enough requests show which."""
        if len(window.bypassed) >= _STEP_REQUESTS:
            self._observed = window.bypassed
        now, share = time(), window.active_share
        is_over = window is not self._windows[-1] or bool(self._scheduler.end_reason)
        is_early = now < max(self._resume_at, window.since + _STEP_S)
        if is_over or is_early or (share and len(window.scheduled) < _STEP_REQUESTS):
            return
        deviations, delay_s = compare_kinds(_by_size(self._observed), _by_size(window.scheduled))
        usual_s = median(seconds for _, seconds in self._observed)
        if deviations > _SLOWER_DEVIATIONS and delay_s > (_SLOWER_RATIO - 1) * usual_s:
            logger.warning(
                "event=share_undone active_share=%g delay_s=%.3f usual_s=%.3f pause_s=%g",
                *(share, delay_s, usual_s, self._pause_s),
            )
            self._resume_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            self._set(max((step for step in _STEPS if step < share), default=0.0))
        elif share < self.target_share:
            self._set(self._next_share)
        else:
            self._is_judged = True

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
            if not self._is_judged:
                # Not now: the event that this entry records is still being observed.
                asyncio.get_running_loop().call_soon(self._judge, window)

    def describe(self) -> dict[str, Any]:
        """Return the share, and the times to first token of both parts.

        `measured` is of all windows in which a part of the traffic was not scheduled.
        """
        split = [window for window in self._windows if window.active_share < 1]
        return {
            "mode": _mode(self.active_share),
            "active_share": self.active_share,
            "target_share": self.target_share,
            "measured": {
                "scheduled": first_token_figures(chain(*(window.scheduled for window in split))),
                "bypassed": first_token_figures(chain(*(window.bypassed for window in split))),
            },
            "windows": [window.describe() for window in self._windows],
        }


def _by_size(samples: _Samples) -> dict[int, list[float]]:
    """Return the latest samples by the size of their prompts, to a factor of four."""
    by_size: dict[int, list[float]] = {}
    for tokens, seconds in list(samples)[-4 * _STEP_REQUESTS :]:
        by_size.setdefault(tokens.bit_length() // 2, []).append(seconds)
    return by_size
