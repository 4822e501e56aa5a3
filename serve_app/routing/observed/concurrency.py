"""The concurrency limit of an engine that does not tell its load: how many requests it is sent at once.

Question: how much is an engine sent whose queue nobody can see? Requests that wait in it can no longer be
reordered, and too few leave it idle. What can be seen is how long answers take to begin. So the number in
flight grows while they begin as fast as usual, and shrinks when they begin late: then they wait for each
other inside the engine.

- *Usual* is the lower quartile of the last observations of like size. It is a quantile and not a minimum,
  because a cached prompt answers faster than any other; and it follows an engine whose speed changes.
- *Late* is more than `late_factor` times the usual, plus `slack_s`.
- On time, and the limit is used: it grows by one for each observation until the first late one, then by
  `increase_ratio` of itself.
- Late: the limit becomes `decrease_ratio` of what is in flight. Requests sent before that say nothing new.

An answer that is not streamed begins when it ends. Its time is compared with others that had as much to
compute, prompt and output together.

Source: AIMD, Chiu and Jain 1989, with the delay as the sign of congestion as in the limiter of Netflix's
concurrency-limits (`AIMDLimit`). Its `Gradient2Limit`, and TCP Vegas, were simulated beside it at commit
718dbd4. The quartile of like sizes is ours.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

# Observations of one size that are remembered, and how many are needed before any can be late.
_REMEMBERED, _ENOUGH = 32, 4
# The limit is in use when so much of it is in flight.
_USED_RATIO = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyRule:
    """How the limit moves; see above. These are no settings: they were chosen by simulation."""

    # Begins low: an engine of unknown size may be a laptop.
    start: int = 8
    late_factor: float = 2.0
    # Prefills that share an iteration delay each other by less than this.
    slack_s: float = 0.25
    # Share of the limit that it grows by at each observation, but at least so much. Large engines have to be
    # found fast, and a small one must not be overrun.
    increase_ratio: float = 1 / 160
    least_increase: float = 0.05
    decrease_ratio: float = 0.9


_RULE = ConcurrencyRule()


class InFlightLimit(Protocol):
    """What limits the requests in flight on an engine that does not tell its load."""

    @property
    def limit(self) -> float:
        """Requests that it may have in flight; at least 1."""

    def observe(self, tokens: int, seconds: float, now: float, *, in_flight: int, streamed: bool) -> None:
        """Learn from one answer that has begun; see `ConcurrencyLimit`."""


class ConcurrencyLimit:
    """The limit of one engine.

    Attributes:
        limit: requests that it may have in flight; at least 1.
    """

    def __init__(self, rule: ConcurrencyRule = _RULE) -> None:
        self._rule = rule
        self.limit = float(rule.start)
        self._usual: dict[tuple[bool, int], deque[float]] = {}
        self._decreased_at = float("-inf")
        self._was_late = False

    def __repr__(self) -> str:
        return f"<ConcurrencyLimit {self.limit:.1f} sizes={len(self._usual)}>"

    def observe(
        self, tokens: int, seconds: float, now: float, *, in_flight: int, streamed: bool = True
    ) -> None:
        """Learn from one answer that has begun.

        Args:
            tokens: that had to be computed until then.
            seconds: since it was sent.
            in_flight: requests in the engine, this one included.
            streamed: it began with its first token; otherwise it came as a whole.
        """
        is_late = self._is_late(tokens, seconds, streamed=streamed)
        rule = self._rule
        if is_late:
            # Sent before the last decrease: it waited behind what the limit no longer allows.
            if now - seconds > self._decreased_at:
                self.limit = max(1.0, rule.decrease_ratio * min(self.limit, in_flight))
                self._decreased_at = now
            self._was_late = True
        elif in_flight >= min(_USED_RATIO * self.limit, int(self.limit)):
            self.limit += self._increase(streamed=streamed) if self._was_late else 1.0

    def _increase(self, *, streamed: bool) -> float:
        # The times of whole answers tell less of a queue, so they are followed with more care.
        rule = self._rule
        return max(rule.least_increase, rule.increase_ratio * self.limit if streamed else 0.0)

    def _is_late(self, tokens: int, seconds: float, *, streamed: bool) -> bool:
        """Whether it took longer than usual, judged before it is counted itself."""
        key = (streamed, max(tokens, 1).bit_length())
        seen = self._usual.get(key)
        if seen is None:
            seen = self._usual[key] = deque(maxlen=_REMEMBERED)
        late = False
        if len(seen) >= _ENOUGH:
            usual_s = sorted(seen)[len(seen) // 4]
            late = seconds > self._rule.late_factor * usual_s + self._rule.slack_s
        seen.append(seconds)
        return late
