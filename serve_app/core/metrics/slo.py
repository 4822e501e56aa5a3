"""Service level objectives: limits on a request's latencies, and SLO attainment."""

from collections.abc import Iterable
from typing import Annotated

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.settings_base import POSITIVE, settings

_LIMIT = POSITIVE.hint("leave it out to set no limit")


@settings(block="slo")
class Slo:
    """Upper limits in seconds that a completed request must meet, all of them. None sets no limit.

    The defaults are those of the pool-routing papers (arXiv 2604.09613): TTFT 2 s and TPOT 80 ms.
    """

    ttft_s: Annotated[float | None, _LIMIT] = 2.0
    tpot_s: Annotated[float | None, _LIMIT] = 0.08
    e2e_s: Annotated[float | None, _LIMIT] = None

    def met_by(self, record: RequestRecord) -> bool:
        """Return whether the request completed within every limit.

        A latency that a record cannot have exceeds no limit: TPOT of a one-token answer, TTFT of an
        unstreamed one.
        """
        return self.met_with(record, self.ttft_s)

    def met_with(self, record: RequestRecord, ttft_limit_s: float | None) -> bool:
        """Return whether the request met all limits, with another limit on TTFT."""
        return (
            record.completed
            and _within(record.ttft_s, ttft_limit_s)
            and _within(record.tpot_s, self.tpot_s)
            and _within(record.e2e_s, self.e2e_s)
        )


def _within(measured_s: float | None, limit_s: float | None) -> bool:
    return limit_s is None or measured_s is None or measured_s <= limit_s


def slo_attainment_ratio(records: Iterable[RequestRecord], slo: Slo) -> float | None:
    """Return the share of all requests, including failed ones, that meet `slo`, or None without requests."""
    met = [slo.met_by(record) for record in records]
    return sum(met) / len(met) if met else None
