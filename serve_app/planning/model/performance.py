"""Results of the queueing model: one replica at a rate, and a pool with its waits."""

from dataclasses import dataclass

from serve_app.metrics.slo import Slo

UTILISATION_CAP = 0.85
"""Highest share of its capacity that a pool is sized for, as in the papers: beyond it waits grow steeply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """One replica at a constant rate.

    Attributes:
        iteration_s: mean seconds of an iteration.
        sequences: mean number in the batch.
        service_s: mean time of a request in the batch.
        first_token_s: P99 over requests of the time from admission to the batch to the first token.
        tpot_s: P99 over requests of the time per output token.
    """

    rate_per_s: float
    iteration_s: float
    sequences: float
    service_s: float
    first_token_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """A pool by the model; its times are infinite where it cannot keep up.

    Attributes:
        utilisation: rate over capacity.
        p99_wait_s: P99 of the wait for a batch slot.
    """

    replicas: int
    utilisation: float
    p99_wait_s: float
    p99_ttft_s: float
    p99_tpot_s: float
    sequences: float

    def meets(self, slo: Slo, utilisation_cap: float = UTILISATION_CAP) -> bool:
        """Whether both P99 limits hold below the utilisation cap."""
        return (
            self.utilisation <= utilisation_cap
            and (slo.ttft_s is None or self.p99_ttft_s <= slo.ttft_s)
            and (slo.tpot_s is None or self.p99_tpot_s <= slo.tpot_s)
        )
