"""Lone batch work: where nobody else is there, engines get enough of it to fill their iterations.

Beside requests of higher classes batch work goes only to an engine that has next to nothing to prefill, so
that whoever comes finds it ready. Where nobody comes that leaves iterations half empty, and short batch
requests lose up to half of their throughput. So an engine gets more once no request above the batch class is
there and none has arrived for a while. The first one that comes then waits for that much more, and ends it.
"""

from serve_app.routing.ledger import ReplicaLedger
from serve_app.scheduling.dispatch.backpressure import EngineBackpressure
from serve_app.scheduling.request import RequestTable

# As long as isolation waits for a short request.
LULL_S = 2.0


class LoneBatch:
    """Tells backpressure whether only batch work is there."""

    def __init__(
        self, requests: RequestTable, backpressure: EngineBackpressure, ledger: ReplicaLedger
    ) -> None:
        self._requests, self._backpressure, self._ledger = requests, backpressure, ledger

    def __repr__(self) -> str:
        return f"<LoneBatch {'on' if self._backpressure.only_batch else 'off'}>"

    def look(self, now: float) -> None:
        """To be called before each dispatch; costs a look at every replica where that has changed."""
        requests = self._requests
        only_batch = not requests.above_batch and now - requests.last_above_batch_at > LULL_S
        if only_batch is not self._backpressure.only_batch:
            self._backpressure.only_batch = only_batch
            self._ledger.on_limits_changed(now)
