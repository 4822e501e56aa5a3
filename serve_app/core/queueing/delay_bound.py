"""The bound on the delay of long prompts: how long the score may put one of them last.

A score that prefers short prompts lets the longest wait until a burst is over. So every long prompt is
compared with its *turn*: the moment at which it would have been dispatched if long prompts went in the order
of arrival. No second schedule is needed for that. Whatever the order, its turn has come when as much work has
left the queue since its arrival as was waiting then.

The longest wait for a turn of late is what the worst request would have waited under first come, first
served. A long prompt is *overdue* when its turn has passed, and it has waited longer than that, times
`wait_ratio`. Overdue heads go first, in the order of arrival. Only much shorter prompts still pass them,
since those cost little. So nobody waits much longer than somebody would have waited anyway, and the score
orders the rest.

Short prompts in the sense of `isolation` are no part of this: isolation lets them pass. Each priority class
has a bound of its own in each pool.

Source: ours.
"""

from collections import deque
from typing import Annotated

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import PrefillClass
from serve_app.core.settings_base import NOT_NEGATIVE, settings

# A prompt passes an overdue one when it is at most this part of it: 2.5 is two fifths.
_PASSING_RATIO = 2.5
# The time after which the longest wait of a turn counts half: about a burst.
_HALF_LIFE_S = 120.0


@settings(block="delay_bound")
class DelayBoundSettings:
    """How long a long prompt may wait beside first come, first served."""

    # A long prompt is overdue when it has waited so many times the longest wait that the order of arrival
    # would have brought of late. A higher ratio serves more requests soon, and the last ones later.
    wait_ratio: Annotated[float, NOT_NEGATIVE.hint("0 switches the bound off")] = 1.2


class DelayBound:
    """The turns of the long prompts of one priority class that are at home in one pool."""

    def __init__(self, settings: DelayBoundSettings) -> None:
        self._settings = settings
        # Prompt tokens that have joined the queue, and that have left it, since the start.
        self._joined_tokens = 0
        self._left_tokens = 0
        # Turn and time of arrival of those whose turn has not come.
        self._line: deque[tuple[int, float]] = deque()
        self._longest_s = 0.0
        self._longest_at = 0.0

    def join(self, scheduled: ScheduledRequest) -> None:
        """A request joins the queue. One that a replica returned goes first anyway."""
        if scheduled.prefill_class is PrefillClass.SHORT or scheduled.returned:
            return
        scheduled.turn = self._joined_tokens
        self._line.append((self._joined_tokens, scheduled.request.arrived_at))
        self._joined_tokens += scheduled.estimate.expected_prompt_tokens

    def leave(self, scheduled: ScheduledRequest, now: float) -> None:
        """A request leaves the queue, for a replica or for good."""
        if scheduled.turn is None:
            return
        while self._line and self._line[0][0] <= self._left_tokens:
            _, arrived_at = self._line.popleft()
            self._longest_s = max(self.longest_s(now), now - arrived_at)
            self._longest_at = now
        self._left_tokens += scheduled.estimate.expected_prompt_tokens
        scheduled.turn = None

    def longest_s(self, now: float) -> float:
        """The longest wait for a turn of late, in seconds; it fades."""
        age_s: float = max(0.0, now - self._longest_at)
        faded: float = self._longest_s * 0.5 ** (age_s / _HALF_LIFE_S)
        return faded

    def is_overdue(self, head: ScheduledRequest, now: float) -> bool:
        """Whether the request should go before all that are not much shorter."""
        if head.turn is None or head.turn >= self._left_tokens:
            return False
        return now - head.request.arrived_at >= self._settings.wait_ratio * self.longest_s(now)

    def arrange(self, heads: list[ScheduledRequest], now: float) -> list[ScheduledRequest]:
        """Heads in the order of service, from that of the score: overdue ones ahead of most others."""
        if not self._settings.wait_ratio:
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
        return f"<DelayBound waiting={waiting} tokens, longest turn {self._longest_s:.1f} s>"
