"""What the tuner orders of a scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Retune:
    """Values to put in force.

    Attributes:
        values: by the path of the setting (`isolation.max_long_prefills`); all that are tuned, not only those
            that change.
        valid_s: for how long; then those that were in force for good come back, unless another order came.
            None: for good.
        reason: for the log.
    """

    values: Mapping[str, float]
    valid_s: float | None = None
    reason: str = ""
