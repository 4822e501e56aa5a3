"""WSPT-DRR: weighted shortest processing time within length classes, deficit round robin between them.

Order: the class whose deficit covers its head after the fewest rounds; within a class the shortest prompt.
Inputs: prompt length, and the service of each class so far.
Ties: the next class in the round robin, then the order of arrival.
Starvation: no class, because each gets its share; within a class, the longest prompts.
Source: NVIDIA Dynamo's router.
"""

from serve_app.core.policies.protocol import OrderingPolicy
from serve_app.core.request import ScheduledRequest

_CLASS_BOUNDS = (256, 1_024, 4_096)
_QUANTUM_TOKENS = 1_024.0


class WsptDrr(OrderingPolicy):
    """Deficit round robin over four length classes; within a class the shortest prompt first."""

    def __init__(self) -> None:
        self._deficit = [0.0] * (len(_CLASS_BOUNDS) + 1)
        self._current = 0

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Return one of four length classes."""
        return str(sum(scheduled.prefill_tokens > bound for bound in _CLASS_BOUNDS))

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return the length, which has the order of WSPT with equal weights (1/length, highest first)."""
        return float(scheduled.prefill_tokens)

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """Sort by the rounds until the deficit of a class covers its head."""
        heads.sort(key=lambda head: (self._rounds(head), self._distance(head), head.sequence))

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """Advance the round robin to this class, and charge it."""
        rounds, number = self._rounds(scheduled), int(scheduled.length_queue)
        self._deficit = [deficit + rounds * _QUANTUM_TOKENS for deficit in self._deficit]
        self._deficit[number] -= scheduled.prefill_tokens
        self._current = number

    def on_round_end(self, waiting_queues: set[str]) -> None:
        """Reset the positive deficit of empty classes."""
        for number in range(len(self._deficit)):
            if str(number) not in waiting_queues:
                self._deficit[number] = min(0.0, self._deficit[number])

    def _rounds(self, head: ScheduledRequest) -> int:
        missing = head.prefill_tokens - self._deficit[int(head.length_queue)]
        return max(0, -int(-missing // _QUANTUM_TOKENS))

    def _distance(self, head: ScheduledRequest) -> int:
        return (int(head.length_queue) - self._current) % len(self._deficit)
