"""Policies over a few fixed length classes: two queues, and WSPT with deficit round robin.

Question: whose class is due? Inputs: prompt length, and what each class has had so far. Ties: the shorter
class. Neither starves anybody: each class gets its share for ever. Sources: the usual short/long split;
NVIDIA Dynamo's weighted shortest processing time with deficit round robin over length classes.
"""

from serve_app.scheduling.policies.inputs import prompt_tokens
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.request import Entry

_SHORT_TOKENS = 512
_SHORT_PER_LONG = 16
_CLASS_BOUNDS = (256, 1_024, 4_096)
_QUANTUM_TOKENS = 1_024.0


class TwoQueues(OrderingPolicy):
    """Up to 512 tokens, and above; sixteen of the short for one of the long while both wait."""

    def __init__(self) -> None:
        self._short_in_a_row = 0

    def queue_of(self, entry: Entry) -> str:
        """Short or long."""
        return "short" if prompt_tokens(entry) <= _SHORT_TOKENS else "long"

    def rank(self, heads: list[Entry], now: float) -> None:
        """The queue whose turn it is."""
        first = "long" if self._short_in_a_row >= _SHORT_PER_LONG else "short"
        heads.sort(key=lambda head: (head.length_queue != first, head.sequence))

    def took(self, entry: Entry) -> None:
        """Count."""
        self._short_in_a_row = self._short_in_a_row + 1 if entry.length_queue == "short" else 0


class WsptDrr(OrderingPolicy):
    """Deficit round robin over four length classes; inside a class the shortest first."""

    def __init__(self) -> None:
        self._deficit = [0.0] * (len(_CLASS_BOUNDS) + 1)
        self._turn = 0

    def queue_of(self, entry: Entry) -> str:
        """One of four classes."""
        return str(sum(prompt_tokens(entry) > bound for bound in _CLASS_BOUNDS))

    def key(self, entry: Entry) -> float:
        """1/length, the shortest first."""
        return float(prompt_tokens(entry))

    def rank(self, heads: list[Entry], now: float) -> None:
        """By the visits that the round robin still makes before a class can pay for its head."""
        heads.sort(key=lambda head: (self._visits(head), self._distance(head), head.sequence))

    def took(self, entry: Entry) -> None:
        """Let the round robin go on to this class, and charge it."""
        visits, number = self._visits(entry), int(entry.length_queue)
        self._deficit = [deficit + visits * _QUANTUM_TOKENS for deficit in self._deficit]
        self._deficit[number] -= prompt_tokens(entry)
        self._turn = number

    def round_ended(self, waiting_queues: set[str]) -> None:
        """A class with nothing to send saves nothing up."""
        for number in range(len(self._deficit)):
            if str(number) not in waiting_queues:
                self._deficit[number] = min(0.0, self._deficit[number])

    def _visits(self, head: Entry) -> int:
        missing = prompt_tokens(head) - self._deficit[int(head.length_queue)]
        return max(0, -int(-missing // _QUANTUM_TOKENS))

    def _distance(self, head: Entry) -> int:
        return (int(head.length_queue) - self._turn) % len(self._deficit)
