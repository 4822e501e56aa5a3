"""Arrived work by home pool: counters that only increase, from which readers compute rates.

Requests rejected for lack of capacity count, because a fleet that is too small rejects most of the demand to
which it should scale. Requests rejected for other reasons, such as the limits of a key, do not count. Nor do
batch requests, because they use only capacity that others leave.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.request import PriorityClass, Request


@dataclass(slots=True)
class PoolArrivals:
    """The work that has arrived for one pool.

    Attributes:
        prefill_tokens: prompt tokens that were not expected to be cached.
        output_tokens: expected tokens of the answers.
    """

    requests: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0


class ArrivedWork:
    """The counters of all pools of a model."""

    def __init__(self, pools: Iterable[str]) -> None:
        self._pools = {pool: PoolArrivals() for pool in pools}

    def add(
        self, pools: Sequence[str], request: Request, estimate: TokenEstimate, cached_tokens: int = 0
    ) -> None:
        """Count a request for its home pool, unless it is of the batch class or no pool can hold it."""
        if not pools or request.priority is PriorityClass.BATCH:
            return
        arrivals = self._pools[pools[0]]
        arrivals.requests += 1
        arrivals.prefill_tokens += max(0, estimate.expected_prompt_tokens - cached_tokens)
        arrivals.output_tokens += estimate.expected_output_tokens

    def __getitem__(self, pool: str) -> PoolArrivals:
        return self._pools[pool]

    def __repr__(self) -> str:
        return f"<ArrivedWork {self._pools}>"
