"""Values that make no sense are refused, with the name of the setting and the value."""

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.dispatch.engine_priority import EnginePrioritySettings
from serve_app.core.dispatch.starvation import ClassFloorSettings, PromotionSettings
from serve_app.core.isolation import IsolationSettings
from serve_app.core.queueing.fairness import FairnessSettings
from serve_app.core.settings import AdmissionSettings, GivenWeights


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (AdmissionSettings, {"tenant_share": 0.0}, "tenant_share must be above 0"),
        (
            BackpressureSettings,
            {"batch_target_waiting": -1},
            "batch_target_waiting must not be negative, got -1",
        ),
        (
            BackpressureSettings,
            {"tpot_gate_s": 0.0},
            "tpot_gate_s must be positive, got 0.0: null is no gate",
        ),
        (BackpressureSettings, {"kv_gate_ratio": 0.0}, "kv_gate_ratio must be positive, got 0.0"),
        (
            BackpressureSettings,
            {"max_prefill_backlog_s": -1.0},
            "max_prefill_backlog_s must be positive, got -1",
        ),
        (ClassFloorSettings, {"batch_share": 0.6}, "class_floors.batch_share must be from 0 to 0.5, got 0.6"),
        (
            EnginePrioritySettings,
            {"target_waiting": 0},
            "engine_priority.target_waiting must be at least 1, got 0",
        ),
        (
            EnginePrioritySettings,
            {"batch_share": 1.5},
            "engine_priority.batch_share must be from 0 to 1, got 1.5",
        ),
        (
            EnginePrioritySettings,
            {"max_prefill_backlog_s": 0.0},
            "max_prefill_backlog_s must be positive, got 0",
        ),
        (
            FairnessSettings,
            {"weights": {"a": 0.0}},
            "fairness.weights of tenant 'a' must be positive, got 0.0",
        ),
        (GivenWeights, {"floor": -1.0}, "weights.floor must be positive, got -1"),
        (GivenWeights, {"w_base": -0.5}, "weights.w_base must not be negative, got -0.5"),
        (IsolationSettings, {"max_long_prefills": -1}, "isolation.max_long_prefills must "),
        (IsolationSettings, {"max_longest_prefills": 0}, "isolation.max_longest_prefills must "),
        (IsolationSettings, {"short_work_share": 1.0}, "isolation.short_work_share must "),
        (IsolationSettings, {"owed_requests": 0.0}, "isolation.owed_requests must "),
        (PromotionSettings, {"promoted_share": 0.0}, "promotion.promoted_share must be above 0"),
        (PromotionSettings, {"batch_s": 0.0}, "promotion.batch_s must be positive, got 0"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(
    settings: Callable[..., object], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**values)
