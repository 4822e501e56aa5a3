"""Snapshots of learned state: restored exactly, or rejected without any change."""

import math
from typing import Any

import pytest

from serve_app.core.routing.estimation.estimate import (
    EstimatorSettings,
    EstimatorState,
    MediaTokens,
    PromptLength,
    PromptLengthState,
    TokenEstimator,
)
from serve_app.core.routing.estimation.output_length import OutputLengthEstimator, OutputState
from serve_app.core.routing.prefill_cost import PrefillCost, PrefillCosts, PrefillCostsState
from serve_app.core.routing.snapshot import decoded, encoded
from serve_app.request import Usage
from tests.core.routing.prompts import request

KINDS: dict[str, type[Any]] = {
    "prompt": PromptLengthState,
    "media": MediaTokens,
    "output": OutputState,
    "cost": PrefillCost,
    "costs": PrefillCostsState,
    "estimator": EstimatorState,
}


def trained() -> dict[str, Any]:
    learners: dict[str, Any] = {
        "prompt": PromptLength(EstimatorSettings()),
        "media": MediaTokens.prior(),
        "output": OutputLengthEstimator(),
        "cost": PrefillCost.prior(),
        "costs": PrefillCosts(),
        "estimator": TokenEstimator(EstimatorSettings()),
    }
    usage = Usage(prompt_tokens=90, output_tokens=30)
    for _ in range(60):
        learners["prompt"].observe(request(messages=2).shape, 131.0)
        learners["media"].observe(1, 700.0)
        learners["output"].observe(request(), usage)
        learners["cost"].observe(400, 0.2)
        learners["costs"].observe("short", 400, 0.2)
        learners["estimator"].observe(request(messages=1), usage)
    return learners


def state_of(learner: Any) -> dict[str, Any]:
    return encoded(learner.state() if hasattr(learner, "state") else learner)


def restore(learner: Any, document: dict[str, object], kind: type[Any]) -> None:
    state = decoded(document, kind)
    if hasattr(learner, "restore"):
        learner.restore(state)


def test_state_learned_from_impossible_reports_can_be_restored() -> None:
    absurd, copy = (PromptLength(EstimatorSettings()) for _ in range(2))
    for _ in range(500):
        absurd.observe(request(text_bytes=1).shape, 200)
    copy.restore(absurd.state())
    assert copy.state() == absurd.state()


def lengths(**changes: object) -> dict[str, object]:
    """Return a state of one category with a changed curve."""
    curve = {"seen": 1, "scale": 1, "ended": {}, "cut": {}, **changes}
    return {"categories": {"prose": curve}, "tenants": []}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("prompt", {"weights": [0.2]}),
        ("prompt", {"weights": [-1.0] * 25}),
        ("prompt", {"weights": [math.nan] * 25}),
        ("prompt", {"covariance": [-1.0] * 625}),
        ("prompt", {"covariance": [1e9 if index == 1 else 0.0 for index in range(625)]}),
        ("prompt", {"covariance": [300.0 if index % 26 == 0 else 0.0 for index in range(625)]}),
        ("prompt", {"deviations": {"prose": [0.1, 4.0]}}),
        ("media", {"mean": -1.0}),
        ("media", {"deviation": -1.0}),
        ("media", {"weight": -1.0}),
        ("output", {"tenants": "none"}),
        ("output", {"categories": {"poetry": {}}}),
        ("output", lengths(ended={"99999": 1.0})),
        ("output", lengths(ended={"3": -1.0})),
        ("output", {"tenants": [{"tenant": 7, "category": "prose", "curve": {}}]}),
        ("costs", {"shared": {}}),
        ("costs", {"pools": {"short": {}}}),
        ("estimator", {"version": 7}),
        *(("estimator", {part: None}) for part in ("version", "text", "media", "output")),
        *((name, None) for name in sorted(KINDS)),
    ],
)
def test_a_corrupt_state_is_rejected_and_not_applied(name: str, change: dict[str, object] | None) -> None:
    learner = trained()[name]
    before = state_of(learner)
    with pytest.raises(ValueError, match=r"learned state|poetry"):
        restore(learner, {} if change is None else {**before, **change}, KINDS[name])
    assert state_of(learner) == before
