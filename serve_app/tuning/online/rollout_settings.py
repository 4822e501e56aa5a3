"""The settings of a roll-out, and the messages that it exchanges with its surroundings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from serve_app.settings_base import (
    ADVANCED,
    FINITE_NOT_NEGATIVE,
    FINITE_POSITIVE,
    NOT_NEGATIVE,
    POSITIVE_SHARE,
    at_least,
    settings,
)
from serve_app.tuning.search.search_space import Values

Mode = Literal["off", "advise", "on"]


@settings(block="rollout")
class RolloutSettings:
    """How a candidate is tried in production, and when it is dropped.

    Attributes:
        mode: `off` takes no candidate; `advise` records what it would have tried and changes nothing; `on`
            tries it.
    """

    mode: Mode = "on"
    # The farthest that a parameter moves in one step, as a share of its range; a whole number may always move
    # by 1. A candidate farther away is reached in several steps, each of which has to win.
    max_step: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.25
    # Seconds that one side is in force. Shorter slices meet more similar traffic and lose more to `settle_s`.
    slice_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 60.0
    # The first seconds of a slice, which are not judged: requests of the other side still fill the engines.
    settle_s: Annotated[float, ADVANCED] = 10.0
    # Pairs of slices, one of each side, at most: a clear result is decided sooner. Eight pairs of 60 s take a
    # quarter of an hour.
    pairs: Annotated[int, at_least(2).hint("one pair is chance"), ADVANCED] = 8
    # Void pairs, those without a reward, before the trial is given up.
    void_pairs: Annotated[int, NOT_NEGATIVE, ADVANCED] = 3
    # Requests that are still open so long after their slice leave it without a reward.
    judge_limit_s: Annotated[float, FINITE_POSITIVE, ADVANCED] = 120.0
    # Distance of the mean reward below the incumbent's that a trial tolerates as noise.
    margin: Annotated[float, FINITE_POSITIVE, ADVANCED] = 0.03
    # The same for the attainment of any class with at least `min_class_requests` on either side. Of 100
    # requests, attainment is known to 2 or 3 of 100.
    attainment_margin: Annotated[float, FINITE_POSITIVE, ADVANCED] = 0.05
    # See `attainment_margin`.
    min_class_requests: Annotated[int, at_least(1), ADVANCED] = 100
    # Both margins are widened by so many standard errors of the noise of neighbouring slices (`slice_noise`).
    # 0 rolls back every step that looks worse, which near saturation is chance.
    noise_allowance: Annotated[float, FINITE_NOT_NEGATIVE, ADVANCED] = 1.0
    # Whether differences are cleared of what the twin expects of the same requests (`control_variate`). This
    # costs some CPU seconds for each pair, within the tuner's share of a core.
    control_variates: Annotated[bool, ADVANCED] = True
    # Largest chance that a step without effect is adopted, however often it is judged meanwhile; a step that
    # harms by half the noise has a tenth of that chance. 1 adopts every step that looks better.
    false_adoption: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.1
    # Seconds without trials after a step that was adopted or looked better without proof; and after one that
    # looked no better.
    cool_down_s: Annotated[float, FINITE_NOT_NEGATIVE, ADVANCED] = 600.0
    # See `cool_down_s`.
    failure_cool_down_s: Annotated[float, FINITE_NOT_NEGATIVE, ADVANCED] = 1_800.0

    def __post_init__(self) -> None:
        if not 0 <= self.settle_s < self.slice_s:
            raise ValueError(
                "rollout.settle_s must be at least 0 and below slice_s, got "
                f"{self.settle_s} and {self.slice_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """A command of the roll-out: put these values in force now.

    Attributes:
        values: by the short names of the parameters.
        valid_s: for how long; None: for good. When the time is over, the values before come back, unless
            another command came. So a tuner that dies in the middle of a trial leaves nothing behind.
    """

    values: Values
    valid_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retune:
    """An order to the scheduler: put these values in force.

    Attributes:
        values: by the paths of the settings (`isolation.max_long_prefills`); all that are tuned, not only
            those that change.
        valid_s: as in `Apply`.
        reason: for the log.
    """

    values: Mapping[str, float]
    valid_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A time slice to judge: the requests that arrived from `start` to `end`.

    Attributes:
        number: counts from 0.
        of_candidate: whether the candidate was in force.
    """

    number: int
    of_candidate: bool
    start: float
    end: float


class Act(StrEnum):
    """The kind of a decision."""

    REFUSED = "refused"
    ADVISED = "advised"
    STARTED = "started"
    JUDGED = "judged"
    ROLLED_BACK = "rolled_back"
    ADOPTED = "adopted"
    FROZEN = "frozen"
    THAWED = "thawed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """One decision, with its reason and the figures that it rests on.

    Attributes:
        at: seconds on the clock of the roll-out's driver.
        values: those that the decision is about.
    """

    at: float
    act: Act
    reason: str
    values: Values = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """In plain values."""
        return asdict(self) | {"act": self.act.value}
