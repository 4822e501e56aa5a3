"""Checks of single settings classes; `test_settings_base` covers ranges."""

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.isolation import IsolationSettings
from serve_app.core.queueing.fairness import FairnessSettings
from serve_app.core.routing.estimation.estimate import EstimatorSettings
from serve_app.core.settings import ScoreWeights


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (
            BackpressureSettings,
            {"tpot_gate_s": 0.0},
            "must be positive, got 0.0: null disables the gate",
        ),
        (EstimatorSettings, {"margin_deviations": -1.0}, "margin_deviations must not be negative"),
        *(
            (FairnessSettings, {"weights": {"a": weight}}, "'a' must be from 0.000001 to 1,000,000, got")
            for weight in (0.0, 1e-320, 1e300, inf, nan)
        ),
        (ScoreWeights, {"floor": -1.0}, "weights.floor must be positive, got -1"),
        *(
            (ScoreWeights, {name: value}, f"weights.{name} must be a number, got {value}")
            for name in ("a_u", "b_u", "a_f", "b_f")
            for value in (nan, inf, -inf)
        ),
        (IsolationSettings, {"prior_longest_tokens": 9}, "at most prior_longest_tokens, got 1024 and 9"),
    ],
)
def test_invalid_values_are_rejected_by_name(
    settings: Callable[..., object], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)
