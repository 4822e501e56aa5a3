"""The speed of a pool's engines: seconds of an engine that a request's prompt and answer take, from reports.

A full engine decodes as many answers at a time as it has slots, so a token of an answer costs it

    output_token_s = TPOT at `slots` sequences / slots

TPOT is a line over the sequences that run, as in `engine_model.step_time`. It is fitted by least squares over
the replicas' reports, of which the last few hundred count. What prefills add to a reported TPOT is taken out,
because prompts are counted on their own. A pool begins with what its engines state of a full batch. While
neither is known, nothing is said of its speed.
"""

from dataclasses import dataclass

# A report's weight after n more is `_KEPT ** n`.
_KEPT = 0.998
# Weight of what the engine states, in reports.
_STATED_WEIGHT = 2.0
# Prefills that fill an engine nearly leave nothing to tell about decoding.
_MOST_PREFILL_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """What a token costs an engine that is full.

    Attributes:
        prefill_token_s: seconds of the engine per prompt token.
        output_token_s: the same per token of an answer.
    """

    prefill_token_s: float
    output_token_s: float

    def seconds(self, prefill_tokens: float, output_tokens: float) -> float:
        """Seconds of one engine for this work."""
        return prefill_tokens * self.prefill_token_s + output_tokens * self.output_token_s


class DecodeLine:
    """TPOT as a line over the number of sequences."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, sequences: float, tpot_s: float, weight: float = 1.0) -> None:
        """Take in one report of a busy engine."""
        self._weight = _KEPT * self._weight + weight
        self._x = _KEPT * self._x + weight * sequences
        self._y = _KEPT * self._y + weight * tpot_s
        self._xx = _KEPT * self._xx + weight * sequences * sequences
        self._xy = _KEPT * self._xy + weight * sequences * tpot_s

    def tpot_s(self, sequences: float) -> float | None:
        """Seconds per token with so many sequences; None before any report."""
        if not self._weight:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread > 1e-9:
            slope = (self._xy / self._weight - mean_x * mean_y) / spread
        # More sequences never make a step shorter, and no step is shorter than nothing.
        slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
        return mean_y + slope * (sequences - mean_x)


class PoolSpeed:
    """The speed of the engines of one pool.

    Attributes:
        slots: sequences that a full replica runs; 0 while no replica has been seen.
    """

    def __init__(self) -> None:
        self._line = DecodeLine()
        self._stated: tuple[float, float] | None = None
        self._prefill_token_s: float | None = None
        self.slots = 0.0

    def state(self, sequences: int, tpot_s: float) -> None:
        """What its engines state of a full batch; counts once."""
        if self._stated != (sequences, tpot_s):
            self._stated = (sequences, tpot_s)
            self._line.observe(sequences, tpot_s, _STATED_WEIGHT)

    def observe(self, sequences: int, tpot_s: float, prefill_ratio: float) -> None:
        """Take in one report.

        Args:
            sequences: that ran at the report.
            prefill_ratio: share of the engine's time that prefills took meanwhile.
        """
        if sequences > 0:
            self._line.observe(sequences, tpot_s * (1.0 - min(prefill_ratio, _MOST_PREFILL_RATIO)))

    def set_prefill(self, token_s: float | None) -> None:
        """Seconds per prompt token, where they are known."""
        self._prefill_token_s = token_s if token_s is not None else self._prefill_token_s

    def now(self, tpot_limit_s: float | None) -> EngineSpeed | None:
        """The speed at present; None while it is not known.

        Args:
            tpot_limit_s: TPOT above which an engine gets nothing more, which may leave slots empty.
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
        """The most sequences whose TPOT is within the limit, at least one."""
        if limit_s is None or (self._line.tpot_s(slots) or 0.0) <= limit_s:
            return slots
        single, full = self._line.tpot_s(1.0) or 0.0, self._line.tpot_s(slots) or 0.0
        if full <= single:
            return slots
        return max(1.0, 1.0 + (slots - 1.0) * (limit_s - single) / (full - single))
