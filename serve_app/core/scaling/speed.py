"""The speed of a pool's engines: seconds of an engine per prompt and output token, learned from reports.

A full engine decodes as many answers at a time as it has slots, so a token of an answer costs it

    output_token_s = TPOT at `slots` sequences / slots

TPOT is linear in the number of running sequences, as in `engines.model.step_time`. It is fitted by least
squares over the replicas' reports, of which about the last few hundred count. The effect of prefills on a
reported TPOT is removed, because prompts are counted separately. The prior is what the engines report of a
full batch when they join. If neither is known, the speed is unknown.
"""

from dataclasses import dataclass

# A report's weight after n more is `_DECAY ** n`.
_DECAY = 0.998
# Weight of the values that engines report when they join, in reports.
_STATED_WEIGHT = 2.0
# An engine almost filled by prefills gives no information about decoding.
_MAX_PREFILL_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """The cost of a token on a full engine.

    Attributes:
        prefill_token_s: engine seconds per prompt token.
        output_token_s: engine seconds per output token.
    """

    prefill_token_s: float
    output_token_s: float

    def seconds(self, prefill_tokens: float, output_tokens: float) -> float:
        """Return the seconds of one engine for this work."""
        return prefill_tokens * self.prefill_token_s + output_tokens * self.output_token_s


class DecodeLine:
    """TPOT as a linear function of the number of sequences."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, sequences: float, tpot_s: float, weight: float = 1.0) -> None:
        """Add one report of a busy engine."""
        self._weight = _DECAY * self._weight + weight
        self._x = _DECAY * self._x + weight * sequences
        self._y = _DECAY * self._y + weight * tpot_s
        self._xx = _DECAY * self._xx + weight * sequences * sequences
        self._xy = _DECAY * self._xy + weight * sequences * tpot_s

    def tpot_s(self, sequences: float) -> float | None:
        """Return the seconds per token with `sequences` sequences, or None before any report."""
        if not self._weight:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread > 1e-9:
            slope = (self._xy / self._weight - mean_x * mean_y) / spread
        # More sequences never make a step shorter, and no step has a negative duration.
        slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
        return mean_y + slope * (sequences - mean_x)


class PoolSpeed:
    """The speed of the engines of one pool.

    Attributes:
        slots: sequences on a full replica; 0 before the first replica.
    """

    def __init__(self) -> None:
        self._line = DecodeLine()
        self._stated: tuple[float, float] | None = None
        self._prefill_token_s: float | None = None
        self.slots = 0.0

    def state(self, sequences: int, tpot_s: float) -> None:
        """Add what its engines report of a full batch when they join. Repeated values count once."""
        if self._stated != (sequences, tpot_s):
            self._stated = (sequences, tpot_s)
            self._line.observe(sequences, tpot_s, _STATED_WEIGHT)

    def observe(self, sequences: int, tpot_s: float, prefill_ratio: float) -> None:
        """Add one report.

        Args:
            prefill_ratio: share of the engine's time that prefills used since the previous report.
        """
        if sequences > 0:
            self._line.observe(sequences, tpot_s * (1.0 - min(prefill_ratio, _MAX_PREFILL_RATIO)))

    def set_prefill(self, token_s: float | None) -> None:
        """Set the seconds per prompt token, if they are known."""
        self._prefill_token_s = token_s if token_s is not None else self._prefill_token_s

    def now(self, tpot_limit_s: float | None) -> EngineSpeed | None:
        """Return the current speed, or None while it is unknown.

        Args:
            tpot_limit_s: TPOT above which an engine receives no more requests, which may leave slots empty.
        """
        if self._prefill_token_s is None or self.slots < 1:
            return None
        full = self._line.tpot_s(self.slots)
        if full is None:
            return None
        slots = self._within(self.slots, tpot_limit_s)
        tpot_s = self._line.tpot_s(slots) or full
        return EngineSpeed(self._prefill_token_s, tpot_s / slots)

    def _within(self, slots: float, limit_s: float | None) -> float:
        """Return the maximum number of sequences whose TPOT is within the limit, at least one."""
        if limit_s is None or (self._line.tpot_s(slots) or 0.0) <= limit_s:
            return slots
        single, full = self._line.tpot_s(1.0) or 0.0, self._line.tpot_s(slots) or 0.0
        if full <= single:
            return slots
        return max(1.0, 1.0 + (slots - 1.0) * (limit_s - single) / (full - single))
