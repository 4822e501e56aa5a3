"""The roll-out of a candidate into production: in bounded steps, on trial, with a way back.

Theory of operation. The roll-out is a machine without a clock. A candidate that won in the twin is proposed.
A step towards it, no longer than allowed, is tried in time slices against the values in force (`canary`), and
either adopted or rolled back. Every call returns what to put in force now, often nothing. Every decision is
noted with its reason and figures (`audit`).

Rules:
- At any time either the incumbent is in force, or values one step away from it, within all bounds.
- The candidate's values are handed out for a little longer than a slice. Whoever applies them returns to the
  incumbent's when that time is over and no other command came.
- A trial ends by a verdict, a freeze or a restart. The incumbent is put in force in the same call, unless the
  step was adopted.
- A step is adopted as soon as the pairs prove it better: its reward exceeds the incumbent's by more than the
  slice noise explains, and no class lost more than its margin and noise. A missing reward, a constant one, or
  one that is not finite adopts nothing.
- After a step nothing is tried for a while, longer after one that looked no better; and never while frozen.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from serve_app.errors import SettingsError
from serve_app.routing.snapshot import Snapshot, number, section, text
from serve_app.tuning.objective.objective import Reward
from serve_app.tuning.online.canary import Canary
from serve_app.tuning.online.control_variate import ControlVariate
from serve_app.tuning.online.rollout_settings import Act, Apply, Audit, RolloutSettings, Slice
from serve_app.tuning.online.slice_noise import Neighbours, SliceNoise
from serve_app.tuning.online.trial_verdict import TrialStatus, Verdict
from serve_app.tuning.search.search_space import SearchSpace, Values

_VERSION = 1
_AUDITS_KEPT = 1_000
# Validity of the candidate's values in slices: a slice may end a little late, because the driver calls only
# now and then.
_GRACE = 1.5


class Rollout:
    """The roll-out of one model.

    Args:
        incumbent: the values of the settings; they may be beyond the bounds of the space.

    Attributes:
        incumbent: the values to return to.
        target: the step on trial; None between trials.
        frozen: the reason, while nothing may be tried; empty otherwise.
        trials: how many were begun.
        acts: how many decisions of each kind were made.
    """

    def __init__(self, space: SearchSpace, incumbent: Values, settings: RolloutSettings) -> None:
        self._space, self._settings = space, settings
        self._configured = self.incumbent = space.checked(incumbent)
        self.target: dict[str, float] | None = None
        self.frozen = ""
        self.trials = 0
        self.acts: Counter[Act] = Counter()
        self._canary: Canary | None = None
        self._neighbours: list[Neighbours] = []
        self._in_force = self.incumbent
        self._rests_until = -float("inf")
        self._audits: deque[Audit] = deque(maxlen=_AUDITS_KEPT)

    def __repr__(self) -> str:
        doing = f"trying {self._canary}" if self._canary else "idle"
        return f"<Rollout {self._settings.mode} {doing}{' frozen' if self.frozen else ''}>"

    @property
    def audit(self) -> tuple[Audit, ...]:
        """The last thousand decisions, the oldest first."""
        return tuple(self._audits)

    def is_ready(self, now: float) -> bool:
        """Whether a candidate would be tried now, or recorded in mode `advise`."""
        return self.why_not(now) == ""

    def why_not(self, now: float) -> str:
        """Why nothing may be tried now; empty when something may."""
        if self._settings.mode == "off":
            return "mode off"
        if self.frozen:
            return f"frozen: {self.frozen}"
        if self._canary is not None:
            return "another step is on trial"
        if now < self._rests_until:
            return f"cool-down, {self._rests_until - now:.0f} s left"
        return ""

    # What happens

    def propose(
        self,
        candidate: Values,
        now: float,
        reason: str = "",
        slice_noise: SliceNoise | None = None,
        control: ControlVariate | None = None,
    ) -> list[Apply]:
        """Try a candidate that won in the twin.

        Args:
            reason: how it won, for the audit.
            slice_noise: noise of slices under the incumbent; None is the strictest.
            control: how to clear slices of what the twin expects, as known so far; `expect` has to follow for
                `to_expect`. None: there will be no expectations.
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
        self.target, self._canary = step, Canary(self._settings, now, slice_noise, control)
        self.trials += 1
        return self._note(now, Act.STARTED, reason, step)

    def tick(self, now: float) -> list[Apply]:
        """Advance the trial, if there is one; to be called every second or so."""
        if self._canary is None or not self._canary.advance(now):
            return []
        return self._side_due()

    def to_judge(self, now: float, settled_until: float) -> list[Slice]:
        """Slices for `judge`: those whose requests are over, and those that took too long.

        Args:
            settled_until: arrival of the oldest request that is still open; `now`, when none is.
        """
        return [] if self._canary is None else self._canary.to_judge(now, settled_until)

    def judge(self, part: Slice, reward: Reward, now: float, settled_until: float) -> list[Apply]:
        """Note the reward of a slice of `to_judge`.

        Args:
            reward: of the requests that arrived in it.
            settled_until: as for `to_judge`. A slice with open requests counts as not measured, because those
                that are over are the quick ones.
        """
        if self._canary is None or self.target is None:
            return []
        if self._canary.is_late(part.number, settled_until):
            reward = Reward(value=None, reason="requests of the slice were still open")
        verdict = self._canary.judge(part.number, reward)
        side = "candidate" if part.of_candidate else "incumbent"
        measured = {} if reward.value is None else {"reward": reward.value}
        why = reward.reason or f"slice {part.number} of the {side}"
        self._note(
            now, Act.JUDGED, why, figures={"slice": part.number, "requests": reward.requests, **measured}
        )
        return self._concluded(verdict, now)

    def to_expect(self) -> list[Slice]:
        """Slices for `expect`: those whose expectation the trial waits for."""
        return [] if self._canary is None else self._canary.to_expect()

    def expect(self, trial: int, rewards: Mapping[int, Reward], now: float) -> list[Apply]:
        """Note what the incumbent would have made of some slices, by their numbers.

        Args:
            trial: the value of `trials` when they were asked for; those of another trial are ignored.
        """
        if self._canary is None or trial != self.trials:
            return []
        return self._concluded(self._canary.expect(rewards), now)

    def use_control(self, control: ControlVariate, now: float) -> list[Apply]:
        """Clear slices by another control variate, fitted to the time before the trial."""
        return [] if self._canary is None else self._concluded(self._canary.use_control(control), now)

    def drop_control(self, now: float) -> list[Apply]:
        """Go on with the trial without expectations."""
        return [] if self._canary is None else self._concluded(self._canary.drop_control(), now)

    def take_neighbours(self) -> list[Neighbours]:
        """Neighbouring slices of one side in the last trial that has ended since the last call."""
        taken, self._neighbours = self._neighbours, []
        return taken

    def freeze(self, now: float, reason: str) -> list[Apply]:
        """Return to the incumbent, and try nothing until `thaw`."""
        self.frozen = reason or "by command"
        self._note(now, Act.FROZEN, self.frozen)
        return self._roll_back(now, f"frozen: {self.frozen}")

    def thaw(self, now: float) -> list[Apply]:
        """Candidates may be tried again."""
        self.frozen = ""
        return self._note(now, Act.THAWED, "by command")

    # Decisions

    def _concluded(self, verdict: Verdict, now: float) -> list[Apply]:
        if verdict.status is TrialStatus.FAILED:
            return self._roll_back(now, verdict.reason, verdict)
        if verdict.status is TrialStatus.UNPROVEN:
            applies = self._roll_back(now, verdict.reason, verdict)
            self._rests_until = now + self._settings.cool_down_s
            return applies
        if verdict.status is TrialStatus.OPEN:
            return []
        assert self.target is not None
        self.incumbent = self._in_force = self.target
        self._note(now, Act.ADOPTED, verdict.reason, self.target, verdict.figures)
        self._end_trial()
        self._rests_until = now + self._settings.cool_down_s
        return [Apply(values=self.incumbent)]

    def _roll_back(self, now: float, reason: str, verdict: Verdict | None = None) -> list[Apply]:
        """End a trial, if there is one, with the incumbent in force."""
        if self._canary is None or self.target is None:
            return []
        self._note(now, Act.ROLLED_BACK, reason, self.target, verdict.figures if verdict else None)
        self._end_trial()
        self._in_force = self.incumbent
        self._rests_until = now + self._settings.failure_cool_down_s
        return [Apply(values=self.incumbent)]

    def _end_trial(self) -> None:
        if self._canary is not None:
            self._neighbours = self._canary.neighbours()
        self._canary, self.target = None, None

    def _side_due(self) -> list[Apply]:
        """The side whose turn it is, if it is not in force or has to be renewed."""
        assert self._canary is not None
        assert self.target is not None
        if self._canary.is_candidates_turn:
            self._in_force = self.target
            return [Apply(values=self.target, valid_s=_GRACE * self._settings.slice_s)]
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
        figures: Any = None,
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
        rests_s = self._rests_until - now
        if self._canary is not None:
            # Its verdict is lost, so it counts as failed.
            rests_s = self._settings.failure_cool_down_s
        return {
            "version": _VERSION,
            "configured": dict(self._configured),
            "incumbent": dict(self.incumbent),
            "frozen": self.frozen,
            "rests_s": max(0.0, rests_s),
            "on_trial": self._canary is not None,
        }

    def restore(self, state: Snapshot, now: float) -> list[Apply]:
        """Take over what `state` returned, and put its incumbent in force.

        Raises:
            ValueError: it is of another space or release or of other settings, has values beyond the bounds,
                or is broken; nothing is taken over then.
        """
        if int(number(state, "version")) != _VERSION:
            raise ValueError(f"learned state: no roll-out of format {_VERSION}; delete it to begin anew")
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
        self._end_trial()
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
