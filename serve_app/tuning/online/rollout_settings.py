"""How carefully does a candidate come into production? The settings, and what a roll-out speaks in."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from serve_app.settings_base import (
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

    mode: Mode = "advise"
    # The farthest that a parameter moves at once, as a share of its range; a whole number may always move by
    # 1. A candidate farther away is reached in several steps, each of which has to win.
    max_step: Annotated[float, POSITIVE_SHARE] = 0.25
    # Seconds that one side is in force. Shorter ones meet more alike traffic, and lose more to `settle_s`.
    slice_s: Annotated[float, FINITE_POSITIVE] = 60.0
    # Of each, the first seconds that are not judged: what was sent before still fills the engines.
    settle_s: float = 10.0
    # Pairs of slices, one of each side, at most: what is clear is decided sooner. Eight are a quarter of an
    # hour in all.
    pairs: Annotated[int, at_least(2).hint("one pair is chance")] = 8
    # Pairs that may come to nothing for lack of figures before the trial is given up.
    void_pairs: Annotated[int, NOT_NEGATIVE] = 3
    # Requests that are not over so long after their slice leave it without figures.
    judge_limit_s: Annotated[float, FINITE_POSITIVE] = 120.0
    # By how much the mean reward may be below the incumbent's while a trial goes on: noise, not harm.
    margin: Annotated[float, FINITE_POSITIVE] = 0.03
    # The same for the share within its targets of any class, from so many requests of it on either side: of
    # 100 requests, that share is known to 2 or 3 of 100.
    attainment_margin: Annotated[float, FINITE_POSITIVE] = 0.05
    min_class_requests: Annotated[int, at_least(1)] = 100
    # Both margins are widened by so many standard errors of what neighbouring slices differ by themselves
    # (`slice_noise`). 0 takes every step back that looks worse, which near saturation is chance.
    noise_allowance: Annotated[float, FINITE_NOT_NEGATIVE] = 1.0
    # Whether differences are cleared of what the twin expects of the same requests (`control_variate`). Costs
    # some CPU seconds for each pair, within the tuner's share of a core.
    control_variates: bool = True
    # At most with this chance a step that changes nothing is adopted, however often it is looked at
    # meanwhile; harm of half a noise has a tenth of it. 1 adopts every step that looks better.
    false_adoption: Annotated[float, POSITIVE_SHARE] = 0.1
    # After a step was adopted or looked better without proof, and after one that looked no better.
    cool_down_s: Annotated[float, FINITE_NOT_NEGATIVE] = 600.0
    failure_cool_down_s: Annotated[float, FINITE_NOT_NEGATIVE] = 1_800.0

    def __post_init__(self) -> None:
        if not 0 <= self.settle_s < self.slice_s:
            raise ValueError(
                "rollout.settle_s must be at least 0 and below slice_s, got "
                f"{self.settle_s} and {self.slice_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Put these values in force now.

    Attributes:
        valid_s: for how long; then whoever applied them returns to the values before, unless it hears
            otherwise. So a tuner that dies in the middle of a trial leaves nothing behind. None: for good.
    """

    values: Values
    valid_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A stretch of time to judge: the requests that arrived from `start` to `end`.

    Attributes:
        number: counts from 0.
        of_candidate: which side was in force.
    """

    number: int
    of_candidate: bool
    start: float
    end: float


class Act(StrEnum):
    """What was decided."""

    REFUSED = "refused"
    ADVISED = "advised"
    STARTED = "started"
    JUDGED = "judged"
    ROLLED_BACK = "rolled_back"
    ADOPTED = "adopted"
    FROZEN = "frozen"
    THAWED = "thawed"
    MODE = "mode"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """One decision, with its reason and the figures that it rests on.

    Attributes:
        at: seconds on the clock of whoever drives the roll-out.
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
