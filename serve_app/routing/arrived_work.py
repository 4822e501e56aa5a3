"""The work that has arrived so far, by the pool where it is at home: counters that only grow.

Whoever wants a rate reads them twice. Requests that are refused for want of capacity count as well: a fleet
that is too small refuses most of what it should grow for. Those that are refused for what they are do not, as
beyond the limits of a key. Batch requests do not either, since they use the capacity that others leave.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_app.request import PriorityClass, Request
from serve_app.routing.estimation.estimate import TokenEstimate


@dataclass(slots=True)
class PoolArrivals:
    """What has arrived for one pool.

    Attributes:
        prefill_tokens: prompt tokens that no cache was expected to hold.
        output_tokens: tokens that the answers were expected to have.
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
        """Count one request, unless it is of the batch class or no pool can hold it.

        Args:
            pools: that may serve it, its home first.
        """
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
