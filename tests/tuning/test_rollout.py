import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serve_app.core.routing.snapshot import decoded, encoded
from serve_app.tuning.objective import Reward
from serve_app.tuning.rollout import DecisionKind, Retune, Rollout, RolloutState
from serve_app.tuning.search_space import Values
from serve_app.tuning.study import Mode, RolloutSettings
from tests.tuning.production import Production, by_name
from tests.tuning.rewards import BEST, CURRENT, rewarded, space

ON = RolloutSettings(mode="on", slice_s=10.0, settle_s=1.0, judge_limit_s=30.0, pairs=4, cool_down_s=100.0)
Judge = Callable[[bool], Reward]
"""The reward of a slice, by whether the candidate's values were current."""


def better(is_candidate: bool) -> Reward:
    return rewarded(0.6 if is_candidate else 0.5)


def worse(is_candidate: bool) -> Reward:
    return rewarded(0.3 if is_candidate else 0.5)


def acts(rollout: Rollout) -> list[DecisionKind]:
    return [each.kind for each in rollout.audit if each.kind is not DecisionKind.JUDGED]


def proposed(**changes: Any) -> Production:
    production = Production(Rollout(space(), CURRENT, replace(ON, **changes)))
    production.execute(production.rollout.propose(BEST, 0.0, "won by 0.1"), 0.0)
    return production


def run(production: Production, begin: float, end: float, judge: Judge) -> None:
    """Drive the rollout second by second."""
    for now in range(int(begin), int(end)):
        production.expire(now)
        production.tick(now, now, judge)


def test_a_candidate_that_holds_is_adopted_and_the_next_may_follow_after_the_cool_down() -> None:
    production = proposed()
    run(production, 0, 90, better)
    rollout = production.rollout
    assert acts(rollout) == [DecisionKind.STARTED, DecisionKind.ADOPTED]
    assert production.permanent == production.values == rollout.incumbent
    assert rollout.incumbent == BEST
    assert rollout.propose(CURRENT, 95.0) == []
    assert "cool-down" in rollout.audit[-1].reason
    production.execute(rollout.propose(CURRENT, 200.0), 200.0)
    run(production, 200, 300, better)
    assert production.values == CURRENT


def test_a_candidate_that_does_harm_is_taken_back_and_nothing_is_tried_for_a_while() -> None:
    production = proposed()
    run(production, 0, 80, worse)
    assert acts(production.rollout) == [DecisionKind.STARTED, DecisionKind.ROLLED_BACK]
    assert production.values == production.permanent == CURRENT
    decision = production.rollout.audit[-1]
    assert "harm after 2 pairs" in decision.reason
    assert decision.figures["mean_difference"] == pytest.approx(-0.2)
    # Three cool-downs after harm, which was found after 40 s.
    assert production.rollout.obstacle(330.0)
    assert not production.rollout.obstacle(350.0)


@pytest.mark.parametrize(
    "reward",
    [
        lambda _: rewarded(None),
        lambda _: rewarded(0.5),
        lambda _: rewarded(math.nan),
        lambda _: rewarded(math.inf),
        lambda is_candidate: rewarded(math.inf if is_candidate else 0.5),
        lambda is_candidate: rewarded(None if is_candidate else 0.5),
        lambda is_candidate: rewarded(0.5 if is_candidate else None),
    ],
    ids=["none", "constant", "nan", "inf", "candidate inf", "candidate none", "incumbent none"],
)
def test_a_poisoned_objective_never_changes_production(reward: Judge) -> None:
    production = proposed()
    run(production, 0, 400, reward)
    assert acts(production.rollout) == [DecisionKind.STARTED, DecisionKind.ROLLED_BACK]
    assert production.values == production.permanent == CURRENT


def test_advice_changes_nothing() -> None:
    production = proposed(mode="advise")
    run(production, 0, 100, better)
    assert production.applied == []
    (advice,) = production.rollout.audit
    assert (advice.kind, advice.reason) == (DecisionKind.ADVISED, "won by 0.1")
    assert advice.values == BEST


def test_off_takes_nothing() -> None:
    assert acts(proposed(mode="off").rollout) == [DecisionKind.REJECTED]


@pytest.mark.parametrize("second", [5, 15, 35])
def test_a_freeze_returns_to_the_incumbent_at_once(second: int) -> None:
    production = proposed()
    run(production, 0, second, better)
    production.execute(production.rollout.freeze(second, "release day"), second)
    assert production.values == CURRENT
    run(production, second, 400, better)
    assert production.rollout.propose(BEST, 1_000.0) == []
    assert "release day" in production.rollout.audit[-1].reason
    production.rollout.thaw(1_001.0)
    production.rollout.propose(BEST, 1_002.0)
    assert acts(production.rollout)[-2:] == [DecisionKind.THAWED, DecisionKind.STARTED]


def test_a_tuner_that_dies_leaves_nothing_behind() -> None:
    production = proposed()
    run(production, 0, 15, better)
    assert production.values != CURRENT
    production.expire(10.0 + 1.5 * ON.slice_s)
    assert production.values == CURRENT


def test_a_restart_returns_to_the_incumbent_and_preserves_adopted_values() -> None:
    production = proposed()
    run(production, 0, 90, better)
    adopted = production.rollout.incumbent
    production.rollout.freeze(90.0, "night")
    stored = decoded(json.loads(json.dumps(encoded(production.rollout.state(90.0)))), RolloutState)
    restored = Rollout(space(), CURRENT, ON)
    (order,) = restored.restore(stored, 5.0)
    assert (by_name(restored, order), order.valid_s, order.reason) == (adopted, None, "tuned before")
    assert (restored.incumbent, restored.frozen) == (adopted, "night")
    restored.thaw(6.0)
    assert restored.obstacle(5.0 + 89.0)
    assert not restored.obstacle(5.0 + 95.0)


def test_a_restart_in_the_middle_of_a_trial_takes_the_candidate_back() -> None:
    production = proposed()
    run(production, 0, 15, better)
    stored = production.rollout.state(15.0)
    restored = Rollout(space(), CURRENT, ON)
    (order,) = restored.restore(stored, 0.0)
    assert (by_name(restored, order), order.valid_s) == (CURRENT, None)
    assert order.reason == "rolled_back: the tuner was restarted during a trial"
    assert acts(restored) == [DecisionKind.ROLLED_BACK]
    assert restored.obstacle(299.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, r"value 7 - at `\$\.version`"),
        ({"incumbent": {"a": 0.0}}, "parameters"),
        ({"incumbent": {**CURRENT, "a": 5.0}}, "out of bounds"),
        ({"incumbent": {**CURRENT, "n": 2.5}}, "out of bounds"),
        ({"incumbent": {**CURRENT, "a": "x"}}, r"got `str` - at `\$\.incumbent\["),
        ({"configured": BEST}, "settings have changed"),
        ({"cool_down_s": -1.0}, r"at `\$\.cool_down_s`"),
        ({"frozen": None}, r"at `\$\.frozen`"),
    ],
)
def test_a_broken_state_is_rejected_as_a_whole(change: dict[str, object], message: str) -> None:
    rollout = Rollout(space(), CURRENT, ON)
    document = {**encoded(Rollout(space(), CURRENT, ON).state(0.0)), **change}
    with pytest.raises(ValueError, match=message):
        rollout.restore(decoded(document, RolloutState), 0.0)
    assert rollout.incumbent == CURRENT
    assert not rollout.obstacle(0.0)


def test_from_settings_beyond_the_bounds_a_candidate_leads_inside() -> None:
    beyond = {**CURRENT, "n": 40}
    rollout = Rollout(space(beyond), beyond, ON)
    assert rollout.incumbent == beyond
    rollout.propose({**BEST, "n": 99}, 0.0)
    assert space().clipped(rollout.target or {}) == rollout.target


@pytest.mark.parametrize(
    "candidate", [{"a": 0.0}, {**BEST, "a": math.nan}, {**BEST, "b": math.inf}, CURRENT], ids=str
)
def test_a_candidate_that_is_none_is_rejected(candidate: Values) -> None:
    rollout = Rollout(space(), CURRENT, ON)
    assert rollout.propose(candidate, 0.0) == []
    assert acts(rollout) == [DecisionKind.REJECTED]


REWARD = st.one_of(
    st.none(), st.floats(allow_nan=True, allow_infinity=True), st.floats(-1.0, 1.0), st.just(0.5)
)
CANDIDATE = st.fixed_dictionaries({"a": st.floats(-9, 9), "b": st.floats(-9, 900), "n": st.integers(-3, 99)})


class Guarded(RuleBasedStateMachine):
    """State machine for the rules of the module, in any order of events."""

    @initialize(mode=st.sampled_from(["on", "on", "advise", "off"]))
    def begin(self, mode: Mode) -> None:
        self.settings = replace(ON, mode=mode, cool_down_s=20.0)
        self.now = 0.0
        self.production = Production(Rollout(space(), CURRENT, self.settings))

    @property
    def rollout(self) -> Rollout:
        return self.production.rollout

    def do(self, orders: list[Retune]) -> None:
        for order in orders:
            values = by_name(self.rollout, order)
            assert space().clipped(values) == values
            if order.valid_s is not None:
                assert self.settings.mode == "on"
                assert not self.rollout.frozen
        self.production.execute(orders, self.now)

    @rule(
        seconds=st.floats(0.0, 40.0), mine=REWARD, theirs=REWARD, lag=st.sampled_from([0.0, 0.0, 5.0, 50.0])
    )
    def time_passes(self, seconds: float, mine: float | None, theirs: float | None, lag: float) -> None:
        self.now += seconds
        self.production.expire(self.now)
        before, candidate = self.rollout.incumbent, self.rollout.target
        adopted = self.rollout.decisions[DecisionKind.ADOPTED]
        self.do(
            self.production.ticked(
                self.now, self.now - lag, lambda is_candidate: rewarded(mine if is_candidate else theirs)
            )
        )
        if self.rollout.decisions[DecisionKind.ADOPTED] == adopted:
            assert self.rollout.incumbent == before
        else:
            # The last reward of a pair decides; a value that is not finite never wins.
            assert mine is not None
            assert math.isfinite(mine)
            assert self.rollout.incumbent == candidate

    @rule(candidate=CANDIDATE)
    def a_candidate_won(self, candidate: Values) -> None:
        self.do(self.rollout.propose(candidate, self.now))

    @rule()
    def frozen(self) -> None:
        self.do(self.rollout.freeze(self.now, "test"))
        assert self.production.values == self.rollout.incumbent

    @rule()
    def thawed(self) -> None:
        self.do(self.rollout.thaw(self.now))

    @rule()
    def restarted(self) -> None:
        stored = decoded(json.loads(json.dumps(encoded(self.rollout.state(self.now)))), RolloutState)
        adopted = self.rollout.incumbent
        self.production.rollout = Rollout(space(), CURRENT, self.settings)
        self.do(self.rollout.restore(stored, self.now))
        assert self.production.values == self.rollout.incumbent == adopted

    @invariant()
    def production_has_the_incumbent_or_the_candidate_on_trial(self) -> None:
        if not hasattr(self, "production"):
            return
        allowed = [self.rollout.incumbent]
        if self.rollout.target is not None:
            allowed.append(self.rollout.target)
        assert self.production.values in allowed
        assert self.production.permanent == self.rollout.incumbent

    @invariant()
    def without_a_trial_the_incumbent_is_in_force(self) -> None:
        if hasattr(self, "production") and self.rollout.target is None:
            assert self.production.values == self.rollout.incumbent


TestGuarded = Guarded.TestCase
TestGuarded.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
