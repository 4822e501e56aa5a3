from dataclasses import replace

import pytest

from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings import ScoreWeights
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import scheduler_settings

ROUTING = RoutingSettings(b_short_tokens=2_048)


def test_one_weight_that_is_set_leaves_the_others() -> None:
    settings = scheduler_settings("ewsjf", ROUTING, {"ewsjf.weights.a_u": 0.5})
    assert settings.ewsjf.weights == replace(ScoreWeights(), a_u=0.5)


def test_an_unknown_weight_or_an_impossible_one_is_rejected() -> None:
    with pytest.raises(SettingsError, match="floor must be positive, got 0"):
        scheduler_settings("ewsjf", ROUTING, {"ewsjf.weights.floor": 0.0})
    with pytest.raises(SettingsError, match="c_u"):
        scheduler_settings("ewsjf", ROUTING, {"ewsjf.weights.c_u": 0.5})
    with pytest.raises(SettingsError, match="'weights', which has a value itself"):
        scheduler_settings("ewsjf", ROUTING, {"ewsjf.weights": 3, "ewsjf.weights.a_u": 0.5})


def test_the_fleet_defines_the_pools_and_the_changes_define_their_use() -> None:
    settings = scheduler_settings(
        "ewsjf", ROUTING, {"routing.spill": False, "backpressure.target_waiting": 5}
    )
    assert settings.routing == replace(ROUTING, spill=False)
    assert settings.backpressure.target_waiting == 5
    assert settings.backpressure.tpot_gate_s is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("routing.b_short_tokens", "b_short_tokens cannot be set"),
        ("policy", "policy cannot be set"),
        ("model.name", "cannot be set below 'model'"),
    ],
)
def test_what_the_run_decides_cannot_be_set(path: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        scheduler_settings("ewsjf", ROUTING, {path: "x"})
