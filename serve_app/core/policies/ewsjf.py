"""EWSJF: learned length queues with density-weighted scores, and prefill isolation.

Order: the head with the highest score, which weighs its shortness, its wait relative to its own prefill, and
its length.
Inputs: prompt length, time of arrival, the learned queues, the learned prefill cost.
Ties: the order of arrival.
Starvation: long prompts. With the paper's weights a 4,096-token head waits more than an hour before it
precedes a fresh 32-token head over 30 queues. `promotion` bounds that.
Source: EWSJF (arXiv 2601.21758), section 4.3, Eq 1 and Eq 4. The class `EwsjfPaper` in
`serve_app.lab.simulation.baselines` also has Algorithm 1.
"""

import math
from dataclasses import dataclass

from serve_app.core.policies.length_queues import LengthQueue, Partition, QueueMap, prior_partition
from serve_app.core.policies.protocol import OrderingPolicy, PolicyInputs
from serve_app.core.request import ScheduledRequest
from serve_app.core.settings import EwsjfSettings, ScoreWeights


@dataclass(slots=True)
class QueueWeights:
    """The weights of Eq 1 for the heads of one queue.

    Attributes:
        queue_weight: q_i, the number of queues minus the queue's index: the shortest queue weighs most.
        base: w_base.
        urgency: w_urg of Eq 4.
        fairness: w_fair of Eq 4.
    """

    queue_weight: float
    base: float
    urgency: float
    fairness: float


def queue_weights(weights: ScoreWeights, *, mean_tokens: float, queue_weight: float) -> QueueWeights:
    """Return the weights of Eq 4 for a queue of this mean length."""
    return QueueWeights(
        queue_weight,
        weights.w_base,
        max(weights.floor, weights.a_u * mean_tokens + weights.b_u),
        max(weights.floor, weights.a_f * mean_tokens + weights.b_f),
    )


def density_weighted_score(weights: QueueWeights, tokens: int, waited_s: float, prefill_s: float) -> float:
    """Return Score(r, q) of Eq 1.

    Args:
        tokens: prompt length b of the head.
        waited_s: W_t.
        prefill_s: C_prefill(b).
    """
    value = weights.base + weights.urgency * waited_s / prefill_s + weights.fairness * math.log(tokens + 1)
    return weights.queue_weight / (tokens + 1) * value


class Ewsjf(OrderingPolicy):
    """Our variant: scored before each dispatch, with prefill isolation, a delay bound, and promotion."""

    isolates = True
    promotes = True
    bounds_delay = True
    learns_queues = True

    def __init__(self, inputs: PolicyInputs) -> None:
        self._weights = inputs.ewsjf.weights
        self._prefill_costs = inputs.prefill_costs
        self.queues = QueueMap(prior_partition())
        # A cache of weights by queue, valid for one value of `queues.changes`: tens of heads are scored for
        # each dispatch.
        self._weights_of: dict[str, QueueWeights] = {}
        self._weights_as_of = self.queues.changes

    def queue_of(self, scheduled: ScheduledRequest) -> str:
        """Return the queue by Dynamic Queue Routing."""
        return self.queues.route(scheduled.prefill_tokens).name

    def queue_bounds(self) -> tuple[LengthQueue, ...]:
        """Return the learned queues and the bubble queues between them."""
        return tuple(self.queues)

    def score(self, head: ScheduledRequest, now: float) -> float:
        """Return the density-weighted score, Eq 1."""
        tokens, name = head.prefill_tokens, head.length_queue
        if self._weights_as_of != self.queues.changes:
            self._reset_weights()
        weights = self._weights_of.get(name)
        if weights is None:
            queue_weight = float(len(self.queues) - self.queues.index(name))
            weights = self._weights_of[name] = queue_weights(
                self._weights, mean_tokens=self.queues[name].mean_tokens, queue_weight=queue_weight
            )
        prefill_s = self._prefill_costs.of(head.pools[0]).seconds(tokens)
        return density_weighted_score(weights, tokens, now - head.request.arrived_at, prefill_s)

    def on_round_end(self, waiting_queues: set[str]) -> None:
        """Remove bubble queues that have been empty for too long."""
        self.queues.retire_bubbles(waiting_queues)

    def retune(self, settings: EwsjfSettings) -> None:
        """Apply other weights."""
        self._weights = settings.weights
        self._reset_weights()

    def replace_partition(self, partition: Partition) -> bool:
        """Apply newly learned queues. All queued requests must be queued again."""
        self.queues.replace(partition)
        return True

    def _reset_weights(self) -> None:
        self._weights_of.clear()
        self._weights_as_of = self.queues.changes
