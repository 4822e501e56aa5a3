"""The size of an engine's batch, learned from its reports where it does not state one.

An engine with requests in its queue runs as many as it can. So when several reports in a row show a queue
and the same number of running sequences, that number is the size of its batch. A KV cache that is nearly full
is another reason to let requests wait, and teaches nothing.

A long prefill can hold others back for a while too, and then the number is too low. It is dropped as soon as
more sequences run, which happens because an engine is always sent a few requests beyond its batch.
"""

from serve_app.routing.replica import ReplicaReport

# Reports in a row that must agree: about a second.
_REPORTS = 5
_KV_FULL = 0.9


class LearnedBatch:
    """Learns the size from one report after the other.

    Attributes:
        size: most sequences that run at once; None while it is unknown.
    """

    def __init__(self) -> None:
        self.size: int | None = None
        self._running = 0
        self._agreeing = 0

    def __repr__(self) -> str:
        return f"<LearnedBatch size={self.size}>"

    def observe(self, report: ReplicaReport) -> None:
        """Learn from a report; one that does not tell what waits and runs teaches nothing."""
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
