"""The size of an engine's batch, learned from its reports if it does not report the limit.

An engine with queued requests runs as many as it can. If several consecutive reports show a queue and the
same number of running sequences, that number is the batch size. Reports with a nearly full KV cache are
ignored, because the cache is another reason for a queue.

A long prefill can also hold others back for a while, and then the number is too low. It is discarded once
more sequences run, which happens because an engine always receives a few requests beyond its batch.
"""

from serve_app.core.routing.replica import ReplicaReport

# Consecutive reports that must agree: about a second.
_REPORTS = 5
_KV_FULL = 0.9


class LearnedBatch:
    """Learns `size`, the maximum number of running sequences, from consecutive reports."""

    def __init__(self) -> None:
        self.size: int | None = None
        self._running = 0
        self._agreeing = 0

    def __repr__(self) -> str:
        return f"<LearnedBatch size={self.size}>"

    def observe(self, report: ReplicaReport) -> None:
        """Learn from a report. Reports without queued and running requests are ignored."""
        running = report.running
        if not report.waiting or not running or (report.kv_usage_ratio or 0.0) > _KV_FULL:
            self._agreeing = 0
        elif running != self._running:
            self._agreeing = 1
        else:
            self._agreeing += 1
        self._running = running or 0
        if self.size is not None and self._running > self.size:
            self.size = None
        if self._agreeing >= _REPORTS:
            self.size = self._running
