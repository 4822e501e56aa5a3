"""Checks of single settings classes; `test_settings_base` covers ranges."""

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.isolation import IsolationSettings
from serve_app.core.queueing.fairness import FairnessSettings
from serve_app.core.routing.estimation.prompt_length import EstimatorSettings
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
        (FairnessSettings, {"weights": {"a": 0.0}}, "weights of tenant 'a' must be positive, got 0.0"),
        (ScoreWeights, {"floor": -1.0}, "weights.floor must be positive, got -1"),
        (IsolationSettings, {"prior_longest_tokens": 9}, "at most prior_longest_tokens, got 1024 and 9"),
    ],
)
def test_invalid_values_are_rejected_by_name(
    settings: Callable[..., object], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)
