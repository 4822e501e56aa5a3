"""Damping of flapping endpoints: one that fails repeatedly must answer for longer before it is used again.

Each failure soon after a recovery doubles the time that the endpoint must answer without a failure before
it receives requests again. Source: the exponential penalty of route flap damping (RFC 2439), with the
doubling of a backoff in place of a decaying figure of merit.
"""

_FIRST_HOLD_S = 1.0
_LONGEST_HOLD_S = 60.0
# A failure this long after a recovery resets the penalty.
_SETTLED_S = 60.0


class FlapDamping:
    """Penalty of one endpoint; all times in seconds of one clock."""

    def __init__(self) -> None:
        self._hold_s = 0.0
        self._up_since: float | None = None
        self._answers_since: float | None = None

    def __repr__(self) -> str:
        return f"<FlapDamping hold {self._hold_s:g} s>"

    @property
    def hold_s(self) -> float:
        """Time for which it must answer before it receives requests."""
        return self._hold_s

    def on_failure(self, now: float) -> None:
        """Record a failure."""
        self._answers_since = None
        if self._up_since is None:
            return
        settled = now - self._up_since >= _SETTLED_S
        self._hold_s = 0.0 if settled else min(max(_FIRST_HOLD_S, 2 * self._hold_s), _LONGEST_HOLD_S)
        self._up_since = None

    def on_answer(self, now: float) -> float:
        """Record an answer, and return the remaining penalty in seconds; 0 for none."""
        if self._answers_since is None:
            self._answers_since = now
        left_s = max(0.0, self._answers_since + self._hold_s - now)
        if not left_s and self._up_since is None:
            self._up_since = now
        return left_s
