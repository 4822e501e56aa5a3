import pytest

from serve_app.core import SchedulerSettings
from serve_app.core.routing.pools import RoutingSettings
from serve_app.tuning.digital_twin import PRESETS, preset_candidates
from serve_app.tuning.search_space import Tunable, space_of

DEFAULTS = Tunable(scheduler=SchedulerSettings(model="m", routing=RoutingSettings(pools=("only",))))


def test_presets_name_parameters_within_their_bounds() -> None:
    bounds = {each.name: (each.low, each.high) for each in space_of(DEFAULTS)}
    for values in PRESETS.values():
        for name, value in values.items():
            low, high = bounds[name]
            assert low <= value <= high, name


def test_every_preset_is_a_candidate_with_the_other_values_as_they_are() -> None:
    space = space_of(DEFAULTS)
    candidates = preset_candidates(DEFAULTS, space)
    assert candidates == [{**space.current, **values} for values in PRESETS.values()]


def test_from_other_values_the_defaults_are_a_candidate_too() -> None:
    space = space_of(DEFAULTS)
    changed = DEFAULTS.with_values({**space.current, "target_waiting": 8, "wait_ratio": 0.6}, space)
    candidates = preset_candidates(changed, space_of(changed))
    assert candidates[0] == space.current
    assert {**space.current, "target_waiting": 8, "wait_ratio": 4.0} in candidates


@pytest.mark.parametrize(("only", "count"), [(("target_waiting",), 2), (("b_u",), 2), (("alpha",), 0)])
def test_presets_keep_to_a_part_of_the_space_without_repetitions(only: tuple[str, ...], count: int) -> None:
    space = space_of(DEFAULTS, only=only)
    candidates = preset_candidates(DEFAULTS, space)
    assert len(candidates) == count
    assert all(set(values) == set(only) and values != space.current for values in candidates)
