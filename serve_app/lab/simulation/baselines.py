"""Baselines: ordering policies for comparisons in simulations, in addition to those of production.

`Sjf`, `Hrrn`, `TwoQueues` and `WsptDrr` are the orders of others, and `EwsjfPaper` and `EwsjfReleased` are
EWSJF as published. `Oracle` is the upper bound, and `RandomOrder` the control. Every order that does not
isolate long prefills is also played with isolation, which separates the gain of an order from the gain of
isolation.

`Oracle` serves the least total work first, with the true output length, which a simulation discloses as
`max_output_tokens` and production cannot know. Ties: order of arrival. It starves long requests without
bound.

`RandomOrder` is the control, because any reordering gains something. Input: the request's id. Ties: order of
arrival. It starves requests at random.

`Sjf`: shortest job first by prompt length.

Order: the shortest prefill.
Inputs: prompt length.
Ties: the order of arrival.
Starvation: long requests, without bound.
Source: textbook.

`Hrrn`: highest response ratio next, `(waited + prefill) / prefill`.

Order: the longest wait relative to the request's own prefill.
Inputs: prompt length, time of arrival, the learned prefill cost.
Ties: the order of arrival.
Starvation: none, since the ratio grows with the wait.
Source: textbook (Brinch Hansen).

`TwoQueues`: short and long prompts, served at a fixed ratio.

Order: sixteen short requests for each long one while both are queued.
Inputs: prompt length, and the number of short requests dispatched in a row.
Ties: the short queue.
Starvation: none.
Source: the usual short/long split.

`WsptDrr`: weighted shortest processing time within length classes, deficit round robin between them.

Order: the class whose deficit covers its head after the fewest rounds; within a class the shortest prompt.
Inputs: prompt length, and the service of each class so far.
Ties: the next class in the round robin, then the order of arrival.
Starvation: no class, because each gets its share; within a class, the longest prompts.
Source: NVIDIA Dynamo's router.

`EwsjfPaper`: EWSJF as published, without isolation, delay bound and promotion.

Order: the head with the highest score. A round fills from the queue of its first dispatch, then from its
neighbours.
Inputs: as `ewsjf`.
Ties: the order of arrival.
Starvation: long prompts, as `ewsjf` without promotion.
Source: EWSJF (arXiv 2601.21758), section 4.3, Algorithm 1.

`EwsjfReleased`: EWSJF as released by its authors.

Order: the head with the highest `wait * (1 + 0.5 ln(L + 1)) * step / (L // step + 1)`. A round dispatches
only from the best queue, without backfill.
Inputs: prompt length, time of arrival.
Ties: the order of arrival.
Starvation: long prompts, less than with the paper's score, because this one is proportional to the wait.
Source: the scoring of the released code.
"""

import math
import zlib
from collections.abc import Mapping

from serve_app.core.policies import POLICIES, MakePolicy
from serve_app.core.policies.ewsjf import Ewsjf
from serve_app.core.policies.protocol import OrderingPolicy, PolicyInputs
from serve_app.core.request import ScheduledRequest


class Sjf(OrderingPolicy):
    """Shortest prompt first."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return the length of the prompt."""
        return float(scheduled.prefill_tokens)

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the negative length: shorter is more urgent."""
        return -self.key(head)


class Hrrn(OrderingPolicy):
    """Highest response ratio next.

    The order by ratio changes with time. Requests therefore wait in queues of nearly equal length (2 %
    apart), each in order of arrival.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._prefill_costs = inputs.prefill_costs

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Return a queue for the length, in steps of 1/32 octave."""
        return str(int(32 * math.log2(scheduled.prefill_tokens)))

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the response ratio less 1, which has the same order."""
        prefill_s = self._prefill_costs.of(head.pools[0]).seconds(head.prefill_tokens)
        return (now - head.request.arrived_at) / prefill_s


# A decoded token occupies an engine for about as long as some dozens of prefilled ones.
_PREFILL_TOKENS_PER_OUTPUT_TOKEN = 10.0


class Oracle(Sjf):
    """Least total work first, including the output, which production cannot know. Not deployable."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return prefill and decode in units of prefilled tokens."""
        output_tokens = scheduled.request.spec.max_output_tokens or 0
        return scheduled.prefill_tokens + _PREFILL_TOKENS_PER_OUTPUT_TOKEN * output_tokens


class RandomOrder(OrderingPolicy):
    """Order by a hash of the request's id, which needs no random generator."""

    def key(self, scheduled: ScheduledRequest) -> float:
        """Return a number that does not depend on the content of the request."""
        return float(zlib.crc32(scheduled.request.request_id.encode()))

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the negative key."""
        return -self.key(head)


_SHORT_TOKENS = 512
_SHORT_PER_LONG = 16


class TwoQueues(OrderingPolicy):
    """Prompts up to 512 tokens and longer ones; sixteen short for each long one while both are queued."""

    def __init__(self) -> None:
        self._short_in_a_row = 0

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Return `short` or `long`."""
        return "short" if scheduled.prefill_tokens <= _SHORT_TOKENS else "long"

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """Sort heads of the queue that is next by the ratio to the front."""
        first = "long" if self._short_in_a_row >= _SHORT_PER_LONG else "short"
        heads.sort(key=lambda head: (head.length_queue != first, head.sequence))

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """Count the short requests dispatched in a row."""
        self._short_in_a_row = self._short_in_a_row + 1 if scheduled.length_queue == "short" else 0


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


class EwsjfPaper(Ewsjf):
    """The paper's policy: Algorithm 1 fills from the best queue, then from its neighbours, nearest first."""

    isolates = False
    promotes = False
    bounds_delay = False

    def __init__(self, inputs: PolicyInputs) -> None:
        super().__init__(inputs)
        self._filling_from: int | None = None

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """Sort by score. Once a round fills from a queue, that queue is first, then its neighbours."""
        super().rank(heads, now)
        index = self._filling_from
        if index is not None:
            heads.sort(key=lambda head: abs(self.queues.index(head.length_queue) - index))

    def on_round_start(self) -> None:
        """Reset the queue of the previous round."""
        self._filling_from = None

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """Select the queue of the first dispatch for the rest of the round."""
        if self._filling_from is None:
            self._filling_from = self.queues.index(scheduled.length_queue)


_STEP_TOKENS = 200


class EwsjfReleased(OrderingPolicy):
    """Queues of equal width, one of which is served in each round."""

    omits_heads = True

    def __init__(self) -> None:
        self._draining: str | None = None

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Return a queue of `_STEP_TOKENS` lengths."""
        low = scheduled.prefill_tokens // _STEP_TOKENS * _STEP_TOKENS
        return f"{low}-{low + _STEP_TOKENS - 1}"

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the released formula."""
        tokens = head.prefill_tokens
        waited_s = now - head.request.arrived_at
        return waited_s * (1 + 0.5 * math.log(tokens + 1)) * _STEP_TOKENS / (tokens // _STEP_TOKENS + 1)

    def rank(self, heads: list[ScheduledRequest], now: float) -> None:
        """Sort by score. Within a round only the queue of its first dispatch remains, while it has heads."""
        super().rank(heads, now)
        if any(head.length_queue == self._draining for head in heads):
            heads[:] = [head for head in heads if head.length_queue == self._draining]

    def on_round_start(self) -> None:
        """Reset the queue of the previous round."""
        self._draining = None

    def on_dispatch(self, scheduled: ScheduledRequest) -> None:
        """Select the queue of the first dispatch for the rest of the round."""
        if self._draining is None:
            self._draining = scheduled.length_queue


_ORDERS: Mapping[str, MakePolicy] = {
    **POLICIES,
    "sjf": lambda _: Sjf(),
    "hrrn": Hrrn,
    "wspt-drr": lambda _: WsptDrr(),
    "two-queue": lambda _: TwoQueues(),
    "ewsjf-released": lambda _: EwsjfReleased(),
    "ewsjf-paper": EwsjfPaper,
}


def _isolated(make: MakePolicy) -> MakePolicy:
    """Add prefill isolation to a policy."""

    def made(inputs: PolicyInputs) -> OrderingPolicy:
        policy = make(inputs)
        policy.isolates = True
        return policy

    return made


_ISOLATED: Mapping[str, MakePolicy] = {
    f"{name}-isolated": _isolated(make)
    for name, make in _ORDERS.items()
    if f"{name}-isolated" not in _ORDERS and not make(PolicyInputs()).isolates
}

SIMULATED_POLICIES: Mapping[str, MakePolicy] = {
    **_ORDERS,
    **_ISOLATED,
    "random": lambda _: RandomOrder(),
    "oracle": lambda _: Oracle(),
}
"""All policies that a simulation can play."""
