"""Rollout of a candidate into production: on trial, with rollback.

The rollout is a state machine without a clock. A candidate that won in the twin is proposed, tried against
the incumbent (`study`), and adopted or rolled back. Every call returns the orders to execute now, often none.
Every decision is recorded with its reason and figures (`audit`).

A candidate is tried as a whole. Part of the way to it gains less, while the noise of a trial stays the same,
so smaller changes are not safer: they are seldom proven, and a bad candidate is detected later.

Rules:

- At any time, either the incumbent is active or the candidate on trial, within all bounds.
- The values of a candidate are valid for slightly longer than a slice. The receiver returns to the incumbent
  when the time has expired without another order.
- A trial ends by a verdict, a freeze or a restart. The same call applies the incumbent, unless the candidate
  was adopted.
- After a trial nothing is tried for a cool-down, which is longer after harm. Nothing is tried while frozen.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec

from serve_app.core import SchedulerSettings
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.core.routing.snapshot import Amount, Number
from serve_app.errors import SettingsError
from serve_app.tuning.search_space import SearchSpace, Values
from serve_app.tuning.study import RewardOf, RolloutSettings, Trial, Verdict

_MAX_AUDITS = 1_000
# Validity of a candidate's values, in slices. A slice may end slightly late: the driver calls periodically.
_VALID_SLICES = 1.5
# Length of the pause after harm, in normal cool-downs, because the next candidate comes from the same twin.
_HARM_COOL_DOWNS = 3.0

NO_OUTCOMES = msgspec.msgpack.encode([])


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Observations of the scheduler since the previous one.

    Attributes:
        incarnation: of the observed scheduler; a new one has no earlier orders.
        lengths: estimated prompt tokens of the requests admitted since the last observation.
        at: current time on the scheduler's clock, like all times here.
        completed_until: arrival of the oldest request that has not ended; `at` if there is none.
        outcomes: the `records`, if requested. Encoded as MessagePack, because pickling takes ten times as
            long.
        replicas: connected replicas, if outcomes were requested.
        settings: settings in effect, without values on trial, if outcomes were requested.
        frozen: why no trials are allowed; empty if they are.
    """

    incarnation: int
    lengths: list[int]
    at: float = 0.0
    completed_until: float = 0.0
    outcomes: bytes = NO_OUTCOMES
    replicas: Sequence[ReplicaSpec] = ()
    settings: SchedulerSettings | None = None
    frozen: str = ""

    @property
    def records(self) -> list[RequestRecord]:
        """Requests that have ended."""
        return msgspec.msgpack.decode(self.outcomes, type=list[RequestRecord])


@dataclass(frozen=True, slots=True, kw_only=True)
class Retune:
    """An order to the scheduler: apply these values now.

    Attributes:
        values: by path of the setting (`isolation.max_long_prefills`); all tuned ones, not only changed ones.
        valid_s: validity in seconds; None for permanent. When it expires without another order, the previous
            values are restored, so a tuner that dies during a trial leaves nothing behind.
        reason: for the log.
    """

    values: Mapping[str, float]
    valid_s: float | None = None
    reason: str = ""


class DecisionKind(StrEnum):
    """Kind of a decision."""

    REJECTED = "rejected"
    ADVISED = "advised"
    STARTED = "started"
    JUDGED = "judged"
    ROLLED_BACK = "rolled_back"
    ADOPTED = "adopted"
    FROZEN = "frozen"
    THAWED = "thawed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A decision with its reason and the figures that it is based on.

    Attributes:
        at: seconds on the clock of the rollout's driver.
        values: values that the decision concerns.
    """

    at: float
    kind: DecisionKind
    reason: str
    values: Values = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)


class RolloutState(msgspec.Struct, kw_only=True):
    """Everything that a restart needs of a `Rollout`."""

    version: Literal[1]
    configured: dict[str, Number]
    incumbent: dict[str, Number]
    frozen: str
    cool_down_s: Amount
    on_trial: bool = False


class Rollout:
    """Rollout of one model.

    Args:
        incumbent: the values of the settings; they may exceed the bounds of the space.

    Attributes:
        incumbent: the values to return to.
        target: the candidate on trial; None between trials.
        frozen: reason for the freeze; empty if not frozen.
        decisions: number of decisions by kind.
    """

    def __init__(self, space: SearchSpace, incumbent: Values, settings: RolloutSettings) -> None:
        self._space, self._settings = space, settings
        self._configured = self.incumbent = space.checked(incumbent)
        self.target: dict[str, float] | None = None
        self.frozen = ""
        self.decisions: Counter[DecisionKind] = Counter()
        self._trial: Trial | None = None
        self._active = self.incumbent
        self._cool_down_until = -float("inf")
        self._audits: deque[Audit] = deque(maxlen=_MAX_AUDITS)

    def __repr__(self) -> str:
        activity = f"trial {self._trial.summary()}" if self._trial else "idle"
        return f"<Rollout {self._settings.mode} {activity}{' frozen' if self.frozen else ''}>"

    @property
    def audit(self) -> tuple[Audit, ...]:
        """The last thousand decisions, oldest first."""
        return tuple(self._audits)

    def obstacle(self, now: float) -> str:
        """Return why nothing may be tried now; empty if a trial is allowed."""
        if self._settings.mode == "off":
            return "the mode is off"
        if self.frozen:
            return f"frozen: {self.frozen}"
        if self._trial is not None:
            return "another trial is in progress"
        if now < self._cool_down_until:
            return f"cool-down, {self._cool_down_until - now:.0f} s left"
        return ""

    # Events

    def propose(self, candidate: Values, now: float, reason: str = "") -> list[Retune]:
        """Try a candidate that won in the twin; `reason` states how, for the audit."""
        if rejection := self.obstacle(now):
            return self._note(now, DecisionKind.REJECTED, rejection, candidate)
        try:
            candidate = self._space.clipped(candidate)
        except SettingsError as error:
            return self._note(now, DecisionKind.REJECTED, str(error))
        if candidate == self.incumbent:
            return self._note(now, DecisionKind.REJECTED, "these are the current values", candidate)
        if self._settings.mode == "advise":
            self._cool_down_until = now + self._settings.cool_down_s
            return self._note(now, DecisionKind.ADVISED, reason, candidate)
        self.target, self._trial = candidate, Trial(self._settings)
        self._trial.advance(now)
        return self._note(now, DecisionKind.STARTED, reason, candidate)

    def tick(self, now: float, completed_until: float, reward_of: RewardOf) -> list[Retune]:
        """Advance the trial, if there is one. To be called about every second.

        Args:
            completed_until: arrival of the oldest request that has not ended; `now` if there is none.
        """
        trial = self._trial
        if trial is None:
            return []
        known = len(trial.differences)
        while trial.judge(now, completed_until, reward_of):
            if len(trial.differences) > known:
                known = len(trial.differences)
                self._note(now, DecisionKind.JUDGED, f"pair {known}", figures=trial.summary())
        if trial.verdict is not None:
            return self._end(now, trial.reason, is_adopted=trial.verdict is Verdict.GAIN)
        return self._values_due(trial, now)

    def freeze(self, now: float, reason: str) -> list[Retune]:
        """Return to the incumbent, and try nothing until `thaw`."""
        self.frozen = reason or "on request"
        self._note(now, DecisionKind.FROZEN, self.frozen)
        return self._end(now, f"frozen: {self.frozen}", is_adopted=False)

    def thaw(self, now: float) -> list[Retune]:
        """Allow trials again."""
        self.frozen = ""
        return self._note(now, DecisionKind.THAWED, "on request")

    # Decisions

    def _end(self, now: float, reason: str, *, is_adopted: bool) -> list[Retune]:
        """End the trial, if there is one, and apply the candidate or the incumbent permanently."""
        trial, candidate = self._trial, self.target
        if trial is None or candidate is None:
            return []
        self._note(
            now,
            DecisionKind.ADOPTED if is_adopted else DecisionKind.ROLLED_BACK,
            reason,
            candidate,
            trial.summary(),
        )
        if is_adopted:
            self.incumbent = candidate
        cool_down_s = self._settings.cool_down_s
        self._cool_down_until = now + (
            _HARM_COOL_DOWNS * cool_down_s if trial.verdict is Verdict.HARM else cool_down_s
        )
        self._trial, self.target, self._active = None, None, self.incumbent
        return self._order(self.incumbent)

    def _values_due(self, trial: Trial, now: float) -> list[Retune]:
        """Return the order that is due if a slice begins or a candidate's slice ends now; else none."""
        assert self.target is not None
        begins = trial.advance(now)
        if begins and trial.is_candidate_slice:
            self._active = self.target
            return self._order(self.target, _VALID_SLICES * self._settings.slice_s)
        if trial.is_candidate_slice and not trial.is_slice_over(now):
            return []
        if self._active == self.incumbent:
            return []
        self._active = self.incumbent
        return self._order(self.incumbent)

    def _order(self, values: Values, valid_s: float | None = None) -> list[Retune]:
        """Return the order to apply these values; its reason is the latest decision."""
        latest = self._audits[-1] if self._audits else None
        reason = f"{latest.kind.value}: {latest.reason}" if latest else "tuned before"
        by_path = {self._space[name].path: value for name, value in values.items()}
        return [Retune(values=by_path, valid_s=valid_s, reason=reason)]

    def _note(
        self,
        now: float,
        kind: DecisionKind,
        reason: str,
        values: Values | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> list[Retune]:
        """Record a decision. Returns no orders."""
        self.decisions[kind] += 1
        self._audits.append(
            Audit(at=now, kind=kind, reason=reason, values=dict(values or {}), figures=dict(figures or {}))
        )
        return []

    # Storage

    def state(self, now: float) -> RolloutState:
        """Return the state to persist, with times as durations. A trial is not resumed."""
        # The verdict of an interrupted trial is lost, so it counts as harm.
        cool_down_s = (
            _HARM_COOL_DOWNS * self._settings.cool_down_s if self._trial else self._cool_down_until - now
        )
        return RolloutState(
            version=1,
            configured=dict(self._configured),
            incumbent=dict(self.incumbent),
            frozen=self.frozen,
            cool_down_s=max(0.0, cool_down_s),
            on_trial=self._trial is not None,
        )

    def restore(self, state: RolloutState, now: float) -> list[Retune]:
        """Restore the result of `state`, and apply its incumbent.

        Raises:
            ValueError: it is for another space or settings, or exceeds the bounds. Nothing of it is used
                then.
        """
        found = state.incumbent
        if set(found) != set(self._space.names):
            raise ValueError(
                f"learned state: it has the parameters {', '.join(sorted(found))}, but those to tune are "
                f"{', '.join(self._space.names)}; delete it to start over"
            )
        if state.configured != self._configured:
            raise ValueError("learned state: the settings have changed, so the tuned values are discarded")
        # Configured values may exceed the bounds. Others must not; clipping gives stored integers their type.
        incumbent = self._configured if found == self._configured else self._space.clipped(found)
        if incumbent != found:
            raise ValueError(f"learned state: values out of bounds: {found}; delete it to start over")
        self._trial, self.target = None, None
        self.incumbent = self._active = incumbent
        self.frozen, self._cool_down_until = state.frozen, now + state.cool_down_s
        if state.on_trial:
            self._note(now, DecisionKind.ROLLED_BACK, "the tuner was restarted during a trial")
        return self._order(incumbent)
