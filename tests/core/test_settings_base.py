"""Ranges and blocks of settings, and checks of single classes."""

import pickle
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, field
from math import inf, nan
from typing import Annotated, Any, Literal

import pytest

from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.isolation import IsolationSettings
from serve_app.core.queueing.fairness import FairnessSettings
from serve_app.core.routing.estimation.estimate import EstimatorSettings
from serve_app.core.settings import ScoreWeights
from serve_app.core.settings_base import (
    ADVANCED,
    FINITE_NOT_NEGATIVE,
    FINITE_POSITIVE,
    INNER_SHARE,
    INTERNAL,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    Range,
    as_config,
    at_least,
    between,
    block_of,
    describe,
    plain,
    read,
    settings,
    share_below,
)
from serve_app.errors import SettingsError


@settings(block="pump")
class Pump:
    rate: Annotated[float, POSITIVE.hint("2 is usual")] = 2.0
    pressure: Annotated[float, POSITIVE, ADVANCED] = 1.0
    valve: Annotated[int, INTERNAL] = 1


@settings
class Garden:
    name: str
    beds: Annotated[int, at_least(1)] = 1
    mode: Literal["wet", "dry"] = "wet"
    limit: Annotated[float | None, share_below(1)] = None
    pump: Pump = field(default_factory=Pump)
    spare: Annotated[Pump | None, ADVANCED] = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.beds > 10:
            raise ValueError("a large garden has no limit")


@settings(block="park")
class Park(Garden):
    limit: Annotated[float, at_least(0.5)] = 0.75
    gates: Annotated[int, NOT_NEGATIVE] = 0

    def __post_init__(self) -> None:
        if self.gates > self.beds:
            raise ValueError("more gates than beds")


def rejection(make: type, **values: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        make(**values)
    return str(caught.value)


def test_settings_are_frozen_slotted_and_take_keywords_only() -> None:
    garden = Garden(name="a")
    with pytest.raises(FrozenInstanceError):
        garden.beds = 2  # type: ignore[misc]
    assert not hasattr(garden, "__dict__")
    with pytest.raises(TypeError):
        Garden("a")  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(garden)) == garden


def test_a_value_out_of_range_is_rejected_with_block_name_value_and_remedy() -> None:
    assert rejection(Pump, rate=-1.0) == "pump.rate must be positive, got -1.0: 2 is usual"
    assert rejection(Garden, name="a", beds=0) == "beds must be at least 1, got 0"
    assert rejection(Garden, name="a", mode="damp") == "mode must be one of wet, dry, got 'damp'"


def test_none_is_in_range_where_the_type_has_it() -> None:
    assert Garden(name="a", limit=None).limit is None
    assert rejection(Garden, name="a", limit=1.0) == "limit must be at least 0 and below 1, got 1.0"


def test_checks_of_two_settings_follow_the_ranges() -> None:
    assert Garden(name="a", beds=20).beds == 20
    with pytest.raises(ValueError, match="a large garden has no limit"):
        Garden(name="a", beds=20, limit=0.5)
    assert "below 1" in rejection(Garden, name="a", beds=20, limit=2.0)


def test_a_subclass_inherits_checks() -> None:
    assert Park(name="a", beds=2, gates=2).limit == 0.75
    assert rejection(Park, name="a", beds=0) == "beds must be at least 1, got 0"
    assert rejection(Park, name="a", gates=-1) == "park.gates must not be negative, got -1"
    assert rejection(Park, name="a", limit=0.25) == "park.limit must be at least 0.5, got 0.25"
    assert rejection(Park, name="a", limit=1.0) == "limit must be at least 0 and below 1, got 1.0"
    with pytest.raises(ValueError, match="a large garden"):
        Park(name="a", beds=20)
    with pytest.raises(ValueError, match="more gates than beds"):
        Park(name="a", gates=2)


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (POSITIVE, (5e-324, 1, inf), (0, -1, nan)),
        (FINITE_POSITIVE, (5e-324, 1, 1.7e308), (0, inf, nan)),
        (NOT_NEGATIVE, (0, 1, inf), (-5e-324, -1, nan)),
        (FINITE_NOT_NEGATIVE, (0, 1), (-1, inf, nan)),
        (SHARE, (0, 0.5, 1), (-0.1, 1.1, nan)),
        (POSITIVE_SHARE, (0.1, 1), (0, 1.1)),
        (INNER_SHARE, (0.1, 0.9), (0, 1)),
        (share_below(0.5), (0, 0.4), (-0.1, 0.5)),
        (at_least(2), (2, 3), (1, 1.9)),
        (between(0, 0.5), (0, 0.5), (-0.1, 0.6)),
    ],
    ids=lambda value: value.words if isinstance(value, Range) else "",
)
def test_ranges_enforce_their_description(
    allowed: Range, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    assert all(allowed.low <= value <= allowed.high for value in inside)
    assert not any(allowed.low <= value <= allowed.high for value in outside)


def test_plain_values_become_settings_and_plain_values_again() -> None:
    given = {"name": "a", "beds": "3", "mode": "dry", "pump": {"rate": "1e-4"}, "advanced": {"spare": None}}
    garden = read(Garden, given, as_file=True)
    assert garden == Garden(name="a", beds=3, mode="dry", pump=Pump(rate=1e-4))
    assert read(Garden, plain(garden), as_file=False) == garden


def test_a_setting_named_after_a_keyword_has_an_underscore_in_python_only() -> None:
    @settings
    class Plot:
        class_: Literal["wet", "dry"] = "wet"

    assert [each.name for each in describe(Plot)] == ["class"]
    assert read(Plot, {"class": "dry"}, as_file=True) == Plot(class_="dry")
    assert plain(Plot(class_="dry")) == {"class": "dry"}


def test_all_errors_are_reported_together() -> None:
    given = {
        "beds": 1.5,
        "mode": "damp",
        "colour": 1,
        "pump": {"rate": 0},
        "spare": {},
        "advanced": {"beds": 1},
    }
    with pytest.raises(SettingsError) as caught:
        read(Garden, given, as_file=True)
    assert str(caught.value).splitlines() == [
        "beds must be a whole number, got 1.5",
        "mode must be one of wet, dry, got 'damp'",
        "colour: unknown key",
        "pump.rate must be positive, got 0.0: 2 is usual",
        "spare is an advanced setting: write it as advanced.spare",
        "advanced.beds is not an advanced setting: write it as beds",
        "name is missing",
    ]


def test_an_internal_setting_can_only_be_set_in_python() -> None:
    assert read(Pump, {"valve": 3}, as_file=False) == Pump(valve=3)
    with pytest.raises(SettingsError, match="valve: unknown key"):
        read(Pump, {"valve": 3}, as_file=True)
    with pytest.raises(SettingsError, match="Pump has no setting valve"):
        as_config(Pump, {"valve": 3})


def test_a_class_describes_its_settings() -> None:
    found = {each.name: each for each in describe(Garden)}
    assert list(found) == ["name", "beds", "mode", "limit", "pump", "spare"]
    assert (found["name"].default, found["beds"].default, found["pump"].default) == (MISSING, 1, Pump())
    assert (found["limit"].kind, found["limit"].allowed) == (float | None, share_below(1))
    assert [name for name, each in found.items() if each.is_advanced] == ["spare"]
    assert {each.name: each.default for each in describe(Park)}["limit"] == 0.75
    assert [block_of(found[name].kind) for name in ("name", "pump", "spare")] == [None, Pump, Pump]


def test_advanced_values_are_written_separately() -> None:
    values = {"beds": 2, "spare": {"rate": 1.0}, "pump": {"rate": 3.0, "pressure": 4.0}}
    assert as_config(Garden, values) == {
        "beds": 2,
        "pump": {"rate": 3.0, "advanced": {"pressure": 4.0}},
        "advanced": {"spare": {"rate": 1.0}},
    }
    with pytest.raises(SettingsError, match="Pump has no setting speed"):
        as_config(Garden, {"pump": {"speed": 1}})


# -- checks of single settings classes --------------------------------------------------------------------


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
