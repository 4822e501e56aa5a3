"""The drain rate of the queue, measured only while the queue is non-empty.

Work counts when it is dispatched, for that is when a wait ends. It is counted in the estimated tokens in
which the work ahead is counted too. What an engine does with it later shows in when it takes the next
request.

An idle fleet dispatches no more than arrives, and would look slow. So the clock of the rate runs only while
requests wait, and what the last backlog taught is still known at the start of the next. A fleet that
dispatches nothing during a backlog lets the rate fall.
"""

from serve_app.routing.rate import DecayingRate

# Long enough to hold some dozens of dispatches of a small fleet, short enough to follow one that is scaled.
_TIME_CONSTANT_S = 30.0


class DrainRate:
    """Tokens and requests dispatched per second of backlog.

    Args:
        now: time at which it begins, in seconds.

    Attributes:
        backlog_s: seconds of backlog so far.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self.backlog_s = 0.0
        self._backlogged = False
        self._tokens = DecayingRate(_TIME_CONSTANT_S, 0.0)
        self._requests = DecayingRate(_TIME_CONSTANT_S, 0.0)

    def on_time(self, waiting: int, now: float) -> None:
        """Note that `waiting` requests have waited from the last call until `now`."""
        self._backlogged = waiting > 0
        if self._backlogged:
            self.backlog_s += now - self._at
        self._at = now

    def on_dispatch(self, tokens: int) -> None:
        """Count the work of a request that leaves the queue at the time of the last `on_time`."""
        if self._backlogged:
            self._tokens.add(tokens, self.backlog_s)
            self._requests.add(1.0, self.backlog_s)

    @property
    def tokens_per_s(self) -> float:
        """Estimated tokens per second of backlog; 0.0 before anything was counted."""
        return self._tokens.per_s(self.backlog_s)

    @property
    def requests_per_s(self) -> float:
        """Requests per second of backlog; 0.0 before anything was counted."""
        return self._requests.per_s(self.backlog_s)

    def __repr__(self) -> str:
        return f"<DrainRate {self.tokens_per_s:.0f} tokens/s {self.requests_per_s:.2f} requests/s>"
