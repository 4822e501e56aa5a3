"""Values that make no sense are refused, with the name of the setting and the value."""

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.core.routing.adaptive_b_short import AdaptiveBShortSettings
from serve_app.core.routing.estimation.bytes_per_token import EstimatorSettings
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.prefix import AffinitySettings
from serve_app.request import TextCategory

BELOW_LOWEST = {
    "b_short_tokens": 50,
    "adaptive_b_short": AdaptiveBShortSettings(enabled=True, b_short_min=64),
}
WITHOUT_CJK = dict.fromkeys(set(TextCategory) - {TextCategory.CJK}, 4.0)


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (AdaptiveBShortSettings, {"b_short_min": 0}, "b_short_min must be at least 1, got 0"),
        (
            AdaptiveBShortSettings,
            {"b_short_min": 5, "b_short_max": 4},
            "b_short_min of 5 is above b_short_max of 4",
        ),
        (AdaptiveBShortSettings, {"memory_s": 0.0}, "memory_s must be a positive number, got 0.0"),
        (AdaptiveBShortSettings, {"tolerance_ratio": 1.0}, "tolerance_ratio must be above 0 and below 1"),
        (AdaptiveBShortSettings, {"max_step_octaves": 0.1}, "max_step_octaves must be at least 0.125"),
        (AdaptiveBShortSettings, {"dwell_s": -1.0}, "dwell_s must not be negative, got -1.0"),
        (AffinitySettings, {"step_cost_tokens": -1.0}, "affinity.step_cost_tokens must .*-1.0"),
        (EstimatorSettings, {"beta": 1.0}, "beta .*1.0"),
        (EstimatorSettings, {"gamma": -1.0}, "gamma .*-1.0"),
        (EstimatorSettings, {"full_weight_tokens": 0}, "full_weight_tokens .*0"),
        (EstimatorSettings, {"cold_bytes_per_token": WITHOUT_CJK}, "cjk"),
        (
            RoutingSettings,
            BELOW_LOWEST,
            "b_short_tokens of 50 is the initial value, so it must lie between .* got 64 and None",
        ),
        (RoutingSettings, {"pools": ()}, "at least one pool"),
        (RoutingSettings, {"pools": ("a", "a")}, "must differ"),
        (RoutingSettings, {"b_short_tokens": 0}, "b_short_tokens must be at least 1, got 0"),
        (RoutingSettings, {"cut_margin_ratio": 1.0}, "cut_margin_ratio must be at least 0 and below 1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(
    settings: Callable[..., object], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)
