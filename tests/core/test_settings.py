"""Checks of single settings classes; `test_settings_base` covers ranges."""

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.isolation import IsolationSettings
from serve_app.core.queueing.fairness import FairnessSettings
from serve_app.core.routing.adaptive_b_short import AdaptiveBShortSettings
from serve_app.core.routing.estimation.bytes_per_token import EstimatorSettings
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings import WeightOverrides
from serve_app.request import TextCategory

BELOW_LOWEST = {
    "b_short_tokens": 50,
    "adaptive_b_short": AdaptiveBShortSettings(enabled=True, b_short_min=64),
}
WITHOUT_CJK = dict.fromkeys(set(TextCategory) - {TextCategory.CJK}, 4.0)


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (
            AdaptiveBShortSettings,
            {"b_short_min": 5, "b_short_max": 4},
            "b_short_min of 5 is above",
        ),
        (
            AdaptiveBShortSettings,
            {"max_step_octaves": 0.1},
            "at least 0.125, got 0.1: the distance",
        ),
        (
            BackpressureSettings,
            {"tpot_gate_s": 0.0},
            "must be positive, got 0.0: null disables the gate",
        ),
        (EstimatorSettings, {"cold_bytes_per_token": WITHOUT_CJK}, "cjk"),
        (FairnessSettings, {"weights": {"a": 0.0}}, "weights of tenant 'a' must be positive, got 0.0"),
        (WeightOverrides, {"floor": -1.0}, "weights.floor must be positive, got -1"),
        (IsolationSettings, {"prior_longest_tokens": 9}, "at most prior_longest_tokens, got 1024 and 9"),
        (RoutingSettings, BELOW_LOWEST, "b_short_tokens of 50 is the initial value, so .* got 64 and None"),
    ],
)
def test_invalid_values_are_rejected_by_name(
    settings: Callable[..., object], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)
