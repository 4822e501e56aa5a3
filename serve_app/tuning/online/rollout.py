"""How does a candidate come into production without harm? In bounded steps, on trial, with a way back.

Theory of operation. The roll-out is a machine without a clock. A candidate that won in the twin is proposed;
a step towards it, no longer than allowed, is tried in time slices against what is in force (`canary`), and
either adopted or dropped. Every call returns what to put in force now, often nothing; every decision is
noted with its reason and figures (`audit`).

Rules:
- At any time either the incumbent is in force, or one step away from it, within all bounds.
- The candidate's values are handed out for the length of a slice and a little more. Whoever applies them
  returns to the incumbent's when that time is over and nothing else was said.
- Whatever ends a trial, be it a verdict, a freeze, another mode, other settings from outside, or a restart,
  the incumbent is put in force in the same call, unless the step was adopted.
- Adopted is what was proven better, as soon as the pairs prove it: a reward above the incumbent's by more
  than the traffic's own slice_noise explain; no class that lost more than its margin and these. A missing reward,
  a constant one, or one that is not finite adopts nothing.
- After a step nothing is tried for a while, after one that looked no better longer; and never while frozen.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from serve_app.errors import SettingsError
from serve_app.routing.snapshot import Snapshot, number, text
from serve_app.tuning.objective.objective import Reward
from serve_app.tuning.online.canary import Canary, TrialStatus, Verdict
from serve_app.tuning.online.control_variate import Control
from serve_app.tuning.online.rollout_settings import Act, Apply, Audit, Mode, RolloutSettings, Slice
from serve_app.tuning.online.slice_noise import Neighbours, SliceNoise
from serve_app.tuning.search.history import values_in
from serve_app.tuning.search.search_space import SearchSpace, Values

_VERSION = 1
_AUDITS_KEPT = 1_000
# A slice may end a little late, since whoever drives the machine looks only now and then.
_GRACE = 1.5


class Rollout:
    """The roll-out of one model.

    Args:
        incumbent: the values in force, as the settings have them; they may be beyond the bounds of the space.

    Attributes:
        incumbent: the values to return to.
        target: the step on trial; None between trials.
        frozen: the reason, while nothing may be tried; empty otherwise.
        mode: see `RolloutSettings`.
        trials: how many were begun.
    """

    def __init__(self, space: SearchSpace, incumbent: Values, settings: RolloutSettings) -> None:
        self._space, self._settings = space, settings
        self.mode: Mode = settings.mode
        self._configured = self.incumbent = space.checked(incumbent)
        self.target: dict[str, float] | None = None
        self.frozen = ""
        self.trials = 0
        self._canary: Canary | None = None
        self._neighbours: list[Neighbours] = []
        self._in_force = self.incumbent
        self._rests_until = -float("inf")
        self._audits: deque[Audit] = deque(maxlen=_AUDITS_KEPT)

    def __repr__(self) -> str:
        doing = f"trying {self._canary}" if self._canary else "idle"
        return f"<Rollout {self.mode} {doing}{' frozen' if self.frozen else ''}>"

    @property
    def in_force(self) -> Values:
        """The values that were put in force last."""
        return self._in_force

    @property
    def audit(self) -> tuple[Audit, ...]:
        """The last thousand decisions, the oldest first."""
        return tuple(self._audits)

    def is_ready(self, now: float) -> bool:
        """Whether a candidate would be tried, or in mode `advise` recorded, now."""
        return self._objection(now) == ""

    # What happens

    def propose(
        self,
        candidate: Values,
        now: float,
        reason: str = "",
        slice_noise: SliceNoise | None = None,
        control: Control | None = None,
    ) -> list[Apply]:
        """A candidate has won in the twin.

        Args:
            reason: how it won, for the audit.
            slice_noise: what slices under the incumbent differ by themselves; None is strict.
            control: how to clear slices of what the twin expects, as far as is known; `expected` has to tell
                then. None: nobody will.
        """
        if denial := self._objection(now):
            return self._note(now, Act.REFUSED, denial, candidate)
        try:
            step = self._space.step(self.incumbent, candidate, self._settings.max_step)
        except SettingsError as error:
            return self._note(now, Act.REFUSED, str(error))
        if step == self.incumbent:
            return self._note(now, Act.REFUSED, "it is what is in force", step)
        if self.mode == "advise":
            self._rests_until = now + self._settings.cool_down_s
            return self._note(now, Act.ADVISED, reason, step)
        self.target, self._canary = step, Canary(self._settings, now, slice_noise, control)
        self.trials += 1
        return self._note(now, Act.STARTED, reason, step)

    def tick(self, now: float) -> list[Apply]:
        """Time has passed; to be called every second or so."""
        if self._canary is None or not self._canary.advance(now):
            return []
        return self._side_due()

    def to_judge(self, now: float, settled_until: float) -> list[Slice]:
        """Slices to tell of with `judged`: those whose requests are over, and those that took too long.

        Args:
            settled_until: when the oldest request arrived that is not over yet; `now`, when none is open.
        """
        return [] if self._canary is None else self._canary.to_judge(now, settled_until)

    def judged(self, part: Slice, reward: Reward, now: float, settled_until: float) -> list[Apply]:
        """What came of a slice, one of `to_judge`.

        Args:
            reward: of the requests that arrived in it.
            settled_until: as for `to_judge`; a slice with open requests has no reward, whatever it seems,
                since those that are over are the quick ones.
        """
        if self._canary is None or self.target is None:
            return []
        if self._canary.is_late(part.number, settled_until):
            reward = Reward(value=None, reason="requests of the slice were still open")
        verdict = self._canary.judge(part.number, reward)
        side = "candidate" if part.of_candidate else "incumbent"
        told = {} if reward.value is None else {"reward": reward.value}
        why = reward.reason or f"slice {part.number} of the {side}"
        self._note(now, Act.JUDGED, why, figures={"slice": part.number, "requests": reward.requests, **told})
        return self._concluded(verdict, now)

    def to_expect(self) -> list[Slice]:
        """Slices to tell of with `expected`: those that the trial waits for."""
        return [] if self._canary is None else self._canary.to_expect()

    def expected(self, trial: int, rewards: Mapping[int, Reward], now: float) -> list[Apply]:
        """What the incumbent would have made of some slices, by their numbers.

        Args:
            trial: as `trials` was when they were asked for; what is said of another is not listened to.
        """
        if self._canary is None or trial != self.trials:
            return []
        return self._concluded(self._canary.expect(rewards), now)

    def controlled(self, control: Control, now: float) -> list[Apply]:
        """How to clear slices of what the twin expects, now that the time before is known better."""
        return [] if self._canary is None else self._concluded(self._canary.clear_by(control), now)

    def not_expected(self, now: float) -> list[Apply]:
        """Nobody can say what the incumbent would have made of the slices; the trial goes on without."""
        return [] if self._canary is None else self._concluded(self._canary.expect_nothing(), now)

    def take_neighbours(self) -> list[Neighbours]:
        """Neighbouring slices of one side in trials that have ended since the last call."""
        taken, self._neighbours = self._neighbours, []
        return taken

    def freeze(self, now: float, reason: str) -> list[Apply]:
        """Return to the incumbent, and try nothing until `thaw`."""
        self.frozen = reason or "by command"
        self._note(now, Act.FROZEN, self.frozen)
        return self._give_up(now, f"frozen: {self.frozen}")

    def thaw(self, now: float) -> list[Apply]:
        """Candidates may be tried again."""
        self.frozen = ""
        return self._note(now, Act.THAWED, "by command")

    def set_mode(self, mode: Mode, now: float) -> list[Apply]:
        """Another mode; a trial ends with anything but `on`.

        Raises:
            ValueError: there is no such mode.
        """
        if mode not in ("off", "advise", "on"):
            raise ValueError(f"mode must be off, advise or on, got {mode!r}")
        self.mode = mode
        self._note(now, Act.MODE, mode)
        return [] if mode == "on" else self._give_up(now, f"mode {mode}")

    def replace_incumbent(self, values: Values, now: float, reason: str) -> list[Apply]:
        """Somebody has put other values in force; a trial ends, and they are what is returned to from now on.

        Raises:
            SettingsError: they are not those of this space.
        """
        new = self._space.checked(values)
        self._end_trial()
        self._configured = self.incumbent = self._in_force = new
        self._note(now, Act.REPLACED, reason, new)
        return [Apply(values=new)]

    # Decisions

    def _objection(self, now: float) -> str:
        """Why nothing may be tried now; empty when something may."""
        if self.mode == "off":
            return "mode off"
        if self.frozen:
            return f"frozen: {self.frozen}"
        if self._canary is not None:
            return "another step is on trial"
        if now < self._rests_until:
            return f"cool-down, {self._rests_until - now:.0f} s left"
        return ""

    def _concluded(self, verdict: Verdict, now: float) -> list[Apply]:
        if verdict.trial_status is TrialStatus.FAILED:
            return self._give_up(now, verdict.reason, verdict)
        if verdict.trial_status is TrialStatus.UNPROVEN:
            applies = self._give_up(now, verdict.reason, verdict)
            self._rests_until = now + self._settings.cool_down_s
            return applies
        if verdict.trial_status is TrialStatus.OPEN:
            return []
        assert self.target is not None
        self.incumbent = self._in_force = self.target
        self._note(now, Act.ADOPTED, verdict.reason, self.target, verdict.figures)
        self._end_trial()
        self._rests_until = now + self._settings.cool_down_s
        return [Apply(values=self.incumbent)]

    def _give_up(self, now: float, reason: str, verdict: Verdict | None = None) -> list[Apply]:
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
        """The side whose turn it is, if it is not in force or its time has to be renewed."""
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
        """Write a decision down; changes nothing."""
        self._audits.append(
            Audit(at=now, act=act, reason=reason, values=dict(values or {}), figures=dict(figures or {}))
        )
        return []

    # Storage

    def state(self, now: float) -> dict[str, Any]:
        """What a restart has to know, in plain values. A trial is not resumed; times are told as spans."""
        rests_s = self._rests_until - now
        if self._canary is not None:
            # Whether it would have held, nobody knows any more.
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
        """Take over what `state` returned; the incumbent is put in force, since nobody knows what is.

        The mode is not part of it: it is what the settings say.

        Raises:
            ValueError: it is of another space or release, of other settings than those of today, has values
                beyond the bounds, or is broken; nothing is taken over then.
        """
        if int(number(state, "version")) != _VERSION:
            raise ValueError(f"learned state: no roll-out of format {_VERSION}; delete it to begin anew")
        if values_in(state, "configured", self._space) != self._configured:
            raise ValueError(
                "learned state: the settings have changed since; what was tuned on top is dropped"
            )
        incumbent = values_in(state, "incumbent", self._space)
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
