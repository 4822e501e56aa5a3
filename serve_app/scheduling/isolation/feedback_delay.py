"""How late is the scheduler told what engines do, and what does that cost?

From its dispatch to the news of its first token, a request is on its way to the engine, computed there, and
the news is on its way back. A short one that comes to an engine with a free seat shows the first and the last
of these: what is left of that time without its prefill and one iteration. It may still have waited for the
prefills of others, so the least of the last so many counts.

A limit of n on what is in flight lets n requests pass in T + L seconds, of which they are computed for T and
under way for L. Where the limit is meant to keep n in the engine, it has to be larger by (T + L) / T.
"""

from collections import deque

# Few enough to follow a change within seconds, enough that one of them waited for nobody.
_REMEMBERED = 64
_LEAST = 16
# Of one long prefill in the mean of them: about the last thirty count.
_WEIGHT = 0.03


class FeedbackDelay:
    """The delay of one fleet.

    Attributes:
        seconds: to the engine and back; 0 until it is known.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_REMEMBERED)
        self._long_s: float | None = None
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"<FeedbackDelay {self.seconds:.3f} s n={len(self._seen)}>"

    def on_short_first_token(self, seconds: float) -> None:
        """A short answer's first token was heard of, so long after its dispatch, prefill and iteration."""
        oldest = self._seen[0] if len(self._seen) == _REMEMBERED else None
        self._seen.append(seconds)
        if len(self._seen) < _LEAST:
            return
        # The minimum changes only with a new one, or when the old one is forgotten.
        if seconds <= self.seconds or oldest is None or oldest <= self.seconds:
            self.seconds = max(0.0, min(self._seen))

    def on_long_first_token(self, seconds: float) -> None:
        """The first token of a long prompt was heard of, so long after its dispatch."""
        self._long_s = seconds if self._long_s is None else self._long_s + _WEIGHT * (seconds - self._long_s)

    def limit_factor(self, usual_s: float) -> float:
        """By what a limit on long prefills in flight has to grow, (T + L) / T.

        Args:
            usual_s: so much of the delay costs nothing.
        """
        lag_s = self.seconds - usual_s
        if lag_s <= 0 or self._long_s is None:
            return 1.0
        return self._long_s / max(self._long_s - lag_s, 0.1 * self._long_s)
