"""What was said of a request's wait when it came."""

from dataclasses import dataclass

Kind = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was said of a request's wait when it came.

    Attributes:
        kind: class, octave of the expected prompt, and whether it came back when it was told to.
        at: when it was made.
        plain_s: work ahead / drain rate.
        wait_s: the same with the correction of its kind.
    """

    kind: Kind
    at: float
    plain_s: float
    wait_s: float
