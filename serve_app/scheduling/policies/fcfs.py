"""First come, first served.

Question: who came first? Inputs: the time of arrival. Ties: the order in which requests were let in. Starves
nobody, and lets one long request hold up every short one behind it. Source: the default of every engine
and gateway; the baseline of all claims.
"""

from serve_app.scheduling.entry import Entry


class Fcfs:
    """One queue, in the order of arrival."""

    isolates = False

    def queue_of(self, entry: Entry) -> str:
        """All requests share one queue."""
        return "all"

    def key(self, entry: Entry) -> float:
        """The time of arrival."""
        return entry.request.arrived_at

    def score(self, head: Entry, now: float) -> float:
        """The time it has waited."""
        return now - head.request.arrived_at


class FcfsIsolated(Fcfs):
    """FCFS among the short and among the long, with long prefills kept apart: isolation alone."""

    isolates = True
