"""The paper's reward: how well the queues fit the lengths, and how long requests wait.

    R = l1 * C + l2 * L - l3 * S - l4 * U        (Eq 5)

- C, compactness: `1 / (1 + v / v0)`, with v the variance of prompt lengths inside their queue, in tokens
  squared, averaged over requests, and v0 a million, a spread of 1,000 tokens. 0 to 1.
- L, load balance: `1 / (1 + CV)`, with CV the coefficient of variation of how many requests each queue got.
  0 to 1.
- S, queue proliferation: queues that got requests, over `max_queues`. From near 0 up; 1 at the limit.
- U, latency: mean wait in the queue over 10 s. From 0 up, without a bound.

Sources: EWSJF (arXiv 2601.21758), section 4.4. The weights 1, 1, 0.5, 1 and the forms of C, L, S and U are
those of secondary readings. Averaging v over requests is our choice: the sources name the variance only.
Queues are told apart by the name under which a request was dispatched, so the partition should not change
within the interval.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

from serve_app.metrics.record import RequestRecord
from serve_app.settings_base import FINITE_NOT_NEGATIVE, FINITE_POSITIVE, settings


@settings(block="objective.paper")
class PaperObjective:
    """Weights of Eq 5, and the scales of its terms."""

    # Of C, how alike the lengths inside a queue are.
    compactness_weight: Annotated[float, FINITE_NOT_NEGATIVE] = 1.0
    # Of L, how evenly the queues are used.
    balance_weight: Annotated[float, FINITE_NOT_NEGATIVE] = 1.0
    # Of S, how many queues are used.
    proliferation_weight: Annotated[float, FINITE_NOT_NEGATIVE] = 0.5
    # Of U, how long requests wait.
    latency_weight: Annotated[float, FINITE_NOT_NEGATIVE] = 1.0
    # Tokens squared at which C is one half.
    variance_scale: Annotated[float, FINITE_POSITIVE] = 1e6
    # Used queues at which S is 1.
    max_queues: Annotated[int, FINITE_POSITIVE] = 32
    # Seconds of mean wait at which U is 1.
    wait_scale_s: Annotated[float, FINITE_POSITIVE] = 10.0

    def value(self, terms: Mapping[str, float]) -> float:
        """Eq 5."""
        return (
            self.compactness_weight * terms["compactness"]
            + self.balance_weight * terms["balance"]
            - self.proliferation_weight * terms["proliferation"]
            - self.latency_weight * terms["latency"]
        )


def paper_terms(counted: Sequence[RequestRecord], settings: PaperObjective) -> dict[str, float]:
    """C, L, S and U of these requests, at least one.

    A request that was never dispatched waited to its end, and is in no known queue.
    """
    queues: dict[str, list[int]] = {}
    for record in counted:
        if record.length_queue:
            queues.setdefault(record.length_queue, []).append(record.prompt_tokens)
    wait_s = statistics.fmean(
        record.e2e_s if record.queue_wait_s is None else record.queue_wait_s for record in counted
    )
    return {
        "compactness": 1 / (1 + _variance_inside(list(queues.values())) / settings.variance_scale),
        "balance": 1 / (1 + _variation([len(members) for members in queues.values()])),
        "proliferation": len(queues) / settings.max_queues,
        "latency": wait_s / settings.wait_scale_s,
    }


def _variance_inside(queues: Sequence[Sequence[int]]) -> float:
    """Tokens squared, as a mean over requests: over queues, a queue of 3 would weigh as one of 1,000."""
    members = sum(map(len, queues))
    squares = sum(len(lengths) * statistics.pvariance(lengths) for lengths in queues)
    return squares / members if members else 0.0


def _variation(sizes: Sequence[int]) -> float:
    """The coefficient of variation; 0 for one queue, or none."""
    return statistics.pstdev(sizes) / statistics.fmean(sizes) if sizes else 0.0
