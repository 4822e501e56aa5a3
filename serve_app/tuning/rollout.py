"""The rollout of a candidate into production: in bounded steps, on trial, with a way back.

Theory of operation. The rollout is a machine without a clock. A candidate that won in the twin is proposed.
A step towards it, no longer than allowed, is tried against the values in force (`trial`), and kept or
withdrawn. Every call returns what to put in force now, often nothing. Every decision is noted with its reason
and figures (`audit`).

Rules:
- At any time either the incumbent is in force, or values one step away from it, within all bounds.
- The values of a step are handed out for a little longer than a slice. Whoever applies them returns to the
  incumbent's when that time is over and no other command came.
- A trial ends by a verdict, a freeze or a restart. The incumbent is put in force in the same call, unless the
  step was kept.
- After a trial nothing is tried for a while, longer after harm; and never while frozen.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from serve_app.core.routing.snapshot import Snapshot, number, section, text
from serve_app.core.settings_base import (
    FINITE_NOT_NEGATIVE,
    FINITE_POSITIVE,
    POSITIVE_SHARE,
    at_least,
    settings,
)
from serve_app.errors import SettingsError
from serve_app.tuning.search_space import SearchSpace, Values
from serve_app.tuning.trial import RewardOf, Trial, Verdict

_VERSION = 1
_AUDITS_KEPT = 1_000
# Validity of a step's values in slices: a slice may end a little late, because the driver calls only now and
# then.
_GRACE = 1.5
# Cool-downs after harm: the next candidate comes from the same twin.
_AFTER_HARM = 3.0

Mode = Literal["off", "advise", "on"]


@settings
class RolloutSettings:
    """How a candidate is tried in production.

    Attributes:
        mode: `off` takes no candidate; `advise` records what it would have tried and changes nothing; `on`
            tries it.
        max_step: farthest that a parameter moves in one step, as a share of its range; a whole number may
            always move by 1. A candidate farther away is reached in several steps, each of which has to win.
        slice_s, settle_s, judge_limit_s, pairs: see `trial.Trial`.
        cool_down_s: seconds without trials after one.
    """

    mode: Mode = "on"
    max_step: Annotated[float, POSITIVE_SHARE] = 0.25
    slice_s: Annotated[float, FINITE_POSITIVE] = 60.0
    settle_s: Annotated[float, FINITE_NOT_NEGATIVE] = 10.0
    judge_limit_s: Annotated[float, FINITE_POSITIVE] = 120.0
    pairs: Annotated[int, at_least(2).hint("one pair is chance")] = 12
    cool_down_s: Annotated[float, FINITE_NOT_NEGATIVE] = 600.0

    def __post_init__(self) -> None:
        if self.settle_s >= self.slice_s:
            raise ValueError(
                f"slice_s must be above {self.settle_s:g}, got {self.slice_s}: less is not judged"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """A command of the rollout: put these values in force now.

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
        at: seconds on the clock of the rollout's driver.
        values: those that the decision is about.
    """

    at: float
    act: Act
    reason: str
    values: Values = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)


class Rollout:
    """The rollout of one model.

    Args:
        incumbent: the values of the settings; they may be beyond the bounds of the space.

    Attributes:
        incumbent: the values to return to.
        target: the step on trial; None between trials.
        frozen: the reason, while nothing may be tried; empty otherwise.
        acts: how many decisions of each kind were made.
    """

    def __init__(self, space: SearchSpace, incumbent: Values, settings: RolloutSettings) -> None:
        self._space, self._settings = space, settings
        self._configured = self.incumbent = space.checked(incumbent)
        self.target: dict[str, float] | None = None
        self.frozen = ""
        self.acts: Counter[Act] = Counter()
        self._trial: Trial | None = None
        self._in_force = self.incumbent
        self._rests_until = -float("inf")
        self._audits: deque[Audit] = deque(maxlen=_AUDITS_KEPT)

    def __repr__(self) -> str:
        doing = f"trying {self._trial.figures()}" if self._trial else "idle"
        return f"<Rollout {self._settings.mode} {doing}{' frozen' if self.frozen else ''}>"

    @property
    def audit(self) -> tuple[Audit, ...]:
        """The last thousand decisions, the oldest first."""
        return tuple(self._audits)

    def why_not(self, now: float) -> str:
        """Why nothing may be tried now; empty when something may."""
        if self._settings.mode == "off":
            return "mode off"
        if self.frozen:
            return f"frozen: {self.frozen}"
        if self._trial is not None:
            return "another step is on trial"
        if now < self._rests_until:
            return f"cool-down, {self._rests_until - now:.0f} s left"
        return ""

    # Events

    def propose(self, candidate: Values, now: float, reason: str = "") -> list[Apply]:
        """Try a candidate that won in the twin.

        Args:
            reason: how it won, for the audit.
        """
        if refusal := self.why_not(now):
            return self._note(now, Act.REFUSED, refusal, candidate)
        try:
            step = self._space.step(self.incumbent, candidate, self._settings.max_step)
        except SettingsError as error:
            return self._note(now, Act.REFUSED, str(error))
        if step == self.incumbent:
            return self._note(now, Act.REFUSED, "these values are in force", step)
        if self._settings.mode == "advise":
            self._rests_until = now + self._settings.cool_down_s
            return self._note(now, Act.ADVISED, reason, step)
        given = self._settings
        self.target = step
        self._trial = Trial(
            pairs=given.pairs,
            slice_s=given.slice_s,
            settle_s=given.settle_s,
            judge_limit_s=given.judge_limit_s,
        )
        self._trial.advance(now)
        return self._note(now, Act.STARTED, reason, step)

    def tick(self, now: float, settled_until: float, reward_of: RewardOf) -> list[Apply]:
        """Advance the trial, if there is one; to be called every second or so.

        Args:
            settled_until: arrival of the oldest request that is still open; `now`, when none is.
        """
        trial = self._trial
        if trial is None:
            return []
        known = len(trial.differences)
        while trial.judge(now, settled_until, reward_of):
            if len(trial.differences) > known:
                known = len(trial.differences)
                self._note(now, Act.JUDGED, f"pair {known}", figures=trial.figures())
        if trial.verdict is not None:
            return self._end(now, trial.reason, is_kept=trial.verdict is Verdict.GAIN)
        return self._side_due(trial, now)

    def freeze(self, now: float, reason: str) -> list[Apply]:
        """Return to the incumbent, and try nothing until `thaw`."""
        self.frozen = reason or "by command"
        self._note(now, Act.FROZEN, self.frozen)
        return self._end(now, f"frozen: {self.frozen}", is_kept=False)

    def thaw(self, now: float) -> list[Apply]:
        """Candidates may be tried again."""
        self.frozen = ""
        return self._note(now, Act.THAWED, "by command")

    # Decisions

    def _end(self, now: float, reason: str, *, is_kept: bool) -> list[Apply]:
        """End the trial, if there is one: the step is in force for good, or the incumbent is."""
        trial, step = self._trial, self.target
        if trial is None or step is None:
            return []
        self._note(now, Act.ADOPTED if is_kept else Act.ROLLED_BACK, reason, step, trial.figures())
        if is_kept:
            self.incumbent = step
        rest_s = self._settings.cool_down_s
        self._rests_until = now + (_AFTER_HARM * rest_s if trial.verdict is Verdict.HARM else rest_s)
        self._trial, self.target, self._in_force = None, None, self.incumbent
        return [Apply(values=self.incumbent)]

    def _side_due(self, trial: Trial, now: float) -> list[Apply]:
        """The side whose slice begins now; nothing while a slice goes on."""
        assert self.target is not None
        begins = trial.advance(now)
        if begins and trial.is_steps_turn:
            self._in_force = self.target
            return [Apply(values=self.target, valid_s=_GRACE * self._settings.slice_s)]
        if trial.is_steps_turn and not trial.is_over(now):
            return []
        if self._in_force == self.incumbent:
            return []
        self._in_force = self.incumbent
        return [Apply(values=self.incumbent)]

    def _note(
        self,
        now: float,
        act: Act,
        reason: str,
        values: Values | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> list[Apply]:
        """Note a decision; puts nothing in force."""
        self.acts[act] += 1
        self._audits.append(
            Audit(at=now, act=act, reason=reason, values=dict(values or {}), figures=dict(figures or {}))
        )
        return []

    # Storage

    def state(self, now: float) -> dict[str, Any]:
        """What a restart needs, in plain values. A trial is not resumed; times are given as durations."""
        # The verdict of a trial is lost, so it counts as harm.
        rests_s = _AFTER_HARM * self._settings.cool_down_s if self._trial else self._rests_until - now
        return {
            "version": _VERSION,
            "configured": dict(self._configured),
            "incumbent": dict(self.incumbent),
            "frozen": self.frozen,
            "rests_s": max(0.0, rests_s),
            "on_trial": self._trial is not None,
        }

    def restore(self, state: Snapshot, now: float) -> list[Apply]:
        """Take over what `state` returned, and put its incumbent in force.

        Raises:
            ValueError: it is of another space or release or of other settings, has values beyond the bounds,
                or is broken; nothing is taken over then.
        """
        if int(number(state, "version")) != _VERSION:
            raise ValueError(f"learned state: no rollout of format {_VERSION}; delete it to begin anew")
        if self._values_in(state, "configured") != self._configured:
            raise ValueError(
                "learned state: the settings have changed since; the values tuned before are dropped"
            )
        incumbent = self._values_in(state, "incumbent")
        if incumbent != self._configured and not self._space.is_within(incumbent):
            raise ValueError(
                f"learned state: values beyond their bounds: {incumbent}; delete it to begin anew"
            )
        frozen, rests_s = text(state, "frozen"), number(state, "rests_s", at_least=0.0)
        self._trial, self.target = None, None
        self.incumbent = self._in_force = incumbent
        self.frozen, self._rests_until = frozen, now + rests_s
        if state.get("on_trial") is True:
            self._note(now, Act.ROLLED_BACK, "the tuner was restarted in the middle of a trial")
        return [Apply(values=incumbent)]

    def _values_in(self, state: Snapshot, name: str) -> dict[str, float]:
        """Values of all parameters under `name`.

        Raises:
            ValueError: there are none, or not those of this space.
        """
        found = section(state, name)
        if set(found) != set(self._space.names):
            raise ValueError(
                f"learned state: it is of the parameters {', '.join(sorted(found))}, and those to tune are "
                f"{', '.join(self._space.names)}; delete the state to begin anew"
            )
        return {each.name: _typed(number(found, each.name), integer=each.integer) for each in self._space}


def _typed(value: float, *, integer: bool) -> float:
    return int(value) if integer and value.is_integer() else value
