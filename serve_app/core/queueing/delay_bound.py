"""Delay bound: limits how long the score may delay a long prompt.

A score that prefers short prompts delays the longest ones until a burst is over. Every long prompt is
therefore compared with its *FCFS turn*: the time at which it would have been dispatched if long prompts were
served in order of arrival. This needs no second schedule: in any order, the FCFS turn of a prompt is reached
when as much work has left the queue since its arrival as was queued then.

The longest recent wait for an FCFS turn is the wait of the worst request under FCFS. A long prompt is
*overdue* when its FCFS turn has passed and it has waited longer than that, times `wait_ratio`. Overdue heads
are first, in order of arrival. Only much shorter prompts pass them, because those cost little. So no request
waits much longer than the worst one under FCFS, and the score orders the rest.

Short prompts as defined by `isolation` are excluded, because isolation allows them to pass. Each priority
class has a separate bound in each pool.

Source: ours.
"""

from collections import deque
from typing import Annotated

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.core.settings_base import NOT_NEGATIVE, settings

# A prompt may pass an overdue one if it is shorter by this factor.
_PASSING_RATIO = 2.5
# Time after which the longest wait for an FCFS turn counts half: about the length of a burst.
_HALF_LIFE_S = 120.0


@settings(block="delay_bound")
class DelayBoundSettings:
    """Bound on the wait of a long prompt, relative to first come, first served."""

    # A long prompt is overdue when it has waited this many times the longest recent wait under first come,
    # first served. A higher ratio serves more requests early, and the last ones later.
    wait_ratio: Annotated[float, NOT_NEGATIVE.hint("0 disables the bound")] = 1.2


class DelayBound:
    """The FCFS turns of the long prompts of one priority class and home pool.

    Attributes:
        settings: may be replaced at any time.
    """

    def __init__(self, settings: DelayBoundSettings) -> None:
        self.settings = settings
        # Prompt tokens that have joined and left the queue since the start.
        self._joined_tokens = 0
        self._left_tokens = 0
        # FCFS turn and arrival time of the requests whose FCFS turn is not reached.
        self._pending_turns: deque[tuple[int, float]] = deque()
        self._longest_s = 0.0
        self._longest_at = 0.0

    def join(self, scheduled: ScheduledRequest) -> None:
        """Add a request that joins the queue. Put-back requests that precede all others are ignored."""
        if scheduled.prefill_class is PrefillClass.SHORT or scheduled.attempts.returned:
            return
        scheduled.fcfs_turn = self._joined_tokens
        self._pending_turns.append((self._joined_tokens, scheduled.request.arrived_at))
        self._joined_tokens += scheduled.estimate.expected_prompt_tokens

    def leave(self, scheduled: ScheduledRequest, now: float) -> None:
        """Remove a request that leaves the queue for any reason."""
        if scheduled.fcfs_turn is None:
            return
        while self._pending_turns and self._pending_turns[0][0] <= self._left_tokens:
            _, arrived_at = self._pending_turns.popleft()
            self._longest_s = max(self.longest_s(now), now - arrived_at)
            self._longest_at = now
        self._left_tokens += scheduled.estimate.expected_prompt_tokens
        scheduled.fcfs_turn = None

    def longest_s(self, now: float) -> float:
        """Return the longest recent wait for an FCFS turn, in seconds. It decays over time."""
        age_s: float = max(0.0, now - self._longest_at)
        decayed_s: float = self._longest_s * 0.5 ** (age_s / _HALF_LIFE_S)
        return decayed_s

    def is_overdue(self, head: ScheduledRequest, now: float) -> bool:
        """Return whether the request should precede all that are not much shorter."""
        if head.fcfs_turn is None or head.fcfs_turn >= self._left_tokens:
            return False
        return now - head.request.arrived_at >= self.settings.wait_ratio * self.longest_s(now)

    def arrange(self, heads: list[ScheduledRequest], now: float) -> list[ScheduledRequest]:
        """Return heads, sorted by score, in the order of service: overdue ones precede most others."""
        if not self.settings.wait_ratio:
            return heads
        overdue = [head for head in heads if self.is_overdue(head, now)]
        if not overdue or len(heads) == 1:
            return heads
        overdue.sort(key=lambda head: (head.request.arrived_at, head.sequence))
        passes = overdue[0].prefill_tokens / _PASSING_RATIO
        others = [head for head in heads if not self.is_overdue(head, now)]
        much_shorter = [head for head in others if head.prefill_tokens <= passes]
        return much_shorter + overdue + [head for head in others if head.prefill_tokens > passes]

    def __repr__(self) -> str:
        waiting = self._joined_tokens - self._left_tokens
        return f"<DelayBound waiting={waiting} tokens, longest wait {self._longest_s:.1f} s>"
