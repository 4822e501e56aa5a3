"""WSPT-DRR: weighted shortest processing time inside length classes, deficit round robin between them.

Question: which class can pay for its head? Inputs: prompt length, and what each class has been served. Ties: the
shorter class. Starves nobody: each class gets its share. Source: NVIDIA Dynamo's router.
"""

from serve_app.scheduling.policies.inputs import prompt_tokens
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.request import ScheduledRequest

_CLASS_BOUNDS = (256, 1_024, 4_096)
_QUANTUM_TOKENS = 1_024.0


class WsptDrr(OrderingPolicy):
    """Deficit round robin over four length classes; inside a class the shortest first."""

    def __init__(self) -> None:
        self._deficit = [0.0] * (len(_CLASS_BOUNDS) + 1)
        self._turn = 0

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """One of four classes."""
        return str(sum(prompt_tokens(scheduled) > bound for bound in _CLASS_BOUNDS))

    def key(self, scheduled: ScheduledRequest) -> float:
        """1/length, the shortest first."""
        return float(prompt_tokens(scheduled))

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """By the visits that the round robin still makes before a class can pay for its head."""
        heads.sort(key=lambda head: (self._visits(head), self._distance(head), head.sequence))

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """Let the round robin go on to this class, and charge it."""
        visits, number = self._visits(scheduled), int(scheduled.length_queue)
        self._deficit = [deficit + visits * _QUANTUM_TOKENS for deficit in self._deficit]
        self._deficit[number] -= prompt_tokens(scheduled)
        self._turn = number

    def on_round_end(self, waiting_queues: set[str]) -> None:
        """A class with nothing to send saves nothing up."""
        for number in range(len(self._deficit)):
            if str(number) not in waiting_queues:
                self._deficit[number] = min(0.0, self._deficit[number])

    def _visits(self, head: ScheduledRequest) -> int:
        missing = prompt_tokens(head) - self._deficit[int(head.length_queue)]
        return max(0, -int(-missing // _QUANTUM_TOKENS))

    def _distance(self, head: ScheduledRequest) -> int:
        return (int(head.length_queue) - self._turn) % len(self._deficit)
