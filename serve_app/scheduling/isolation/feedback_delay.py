"""Feedback delay: how late the scheduler hears of first tokens, and how limits in flight allow for it.

The time from a dispatch to the notice of its first token has three parts: the way to the engine, the
computation, and the way back. A short request that reaches an engine with a free slot shows the first and the
last: what is left of that time without its prefill and one iteration. It may still have waited for the
prefills of others, so the minimum of recent requests is used.

A limit of n requests in flight lets n requests pass in T + L seconds, of which each is computed for T and
under way for L. To keep n in the engine, the limit has to be larger by the factor (T + L) / T.
"""

from collections import deque

# Few enough to follow a change within seconds, enough that one of them waited for no other prefill.
_WINDOW = 64
_MIN_OBSERVATIONS = 16
# Weight of one long prefill in their mean: about the last thirty count.
_WEIGHT = 0.03


class FeedbackDelay:
    """The delay of one fleet.

    Attributes:
        seconds: to the engine and back; 0 until it is known.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._long_s: float | None = None
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"<FeedbackDelay {self.seconds:.3f} s n={len(self._recent)}>"

    def on_short_first_token(self, seconds: float) -> None:
        """A first-token notice of a short prompt; `seconds` from dispatch, less prefill and one iteration."""
        oldest = self._recent[0] if len(self._recent) == _WINDOW else None
        self._recent.append(seconds)
        if len(self._recent) < _MIN_OBSERVATIONS:
            return
        # The minimum changes only with a new one, or when the old one leaves the window.
        if seconds <= self.seconds or oldest is None or oldest <= self.seconds:
            self.seconds = max(0.0, min(self._recent))

    def on_long_first_token(self, seconds: float) -> None:
        """A first-token notice of a long prompt, so many seconds after its dispatch."""
        self._long_s = seconds if self._long_s is None else self._long_s + _WEIGHT * (seconds - self._long_s)

    def limit_factor(self, usual_s: float) -> float:
        """The factor (T + L) / T for limits on long prefills in flight.

        Args:
            usual_s: the part of the delay that costs nothing.
        """
        delay_s = self.seconds - usual_s
        if delay_s <= 0 or self._long_s is None:
            return 1.0
        return self._long_s / max(self._long_s - delay_s, 0.1 * self._long_s)
