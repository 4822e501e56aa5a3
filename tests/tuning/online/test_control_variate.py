import itertools
import math
from random import Random

import pytest

from serve_app.tuning.objective.objective import Reward
from serve_app.tuning.online import control_variate
from serve_app.tuning.online.control_variate import ControlVariate
from serve_app.tuning.online.slice_noise import Measured, neighbours_in
from tests.tuning.rewards import rewarded


def control_of(seen: list[Reward], expected: list[Reward]) -> ControlVariate:
    return control_variate.control_of(neighbours_in(map(Measured, seen, expected)))


def slices(*values: float | None) -> list[Reward]:
    """Slices with these rewards, and as many of a class within its targets."""
    return [
        rewarded(value, {} if value is None else {"default short": (100, min(1.0, max(0.0, value)))})
        for value in values
    ]


def test_a_twin_that_is_right_explains_all() -> None:
    seen = [0.5, 0.2, 0.9, 0.4]
    control = control_of(slices(*seen), slices(*seen))
    assert control.reward == pytest.approx(1.0)
    assert control.residual.reward == pytest.approx(0.0)
    assert control.attainment == {"default short": pytest.approx(1.0)}
    assert control.residual.attainment == {"default short": pytest.approx(0.0)}


def test_a_twin_that_sees_half_of_it_is_believed_by_about_half() -> None:
    seen = [0.1 * math.sin(3.0 * place) for place in range(13)]
    control = control_of(slices(*seen), slices(*(2 * each for each in seen)))
    # Drawn towards 1 by two pairs of fourteen.
    assert control.reward == pytest.approx((0.5 * 12 + 2) / 14)
    noise = math.sqrt(sum((after - before) ** 2 for before, after in itertools.pairwise(seen)) / 12)
    assert control.residual.reward == pytest.approx(noise / 7)


def test_a_twin_that_says_the_contrary_is_not_believed() -> None:
    seen = [0.5, 0.2, 0.9, 0.4, 0.7, 0.1]
    control = control_of(slices(*seen), slices(*(1.0 - each for each in seen)))
    assert control.reward == pytest.approx(0.0)
    noise = math.sqrt(sum((after - before) ** 2 for before, after in itertools.pairwise(seen)) / 5)
    assert control.residual.reward == pytest.approx(noise)


def test_a_wild_twin_is_believed_the_less_the_more_is_known() -> None:
    noise = Random(0)
    slopes = []
    for count in (3, 13, 100):
        found = [
            control_of(
                slices(*(noise.gauss(0.5, 0.1) for _ in range(count))),
                slices(*(noise.gauss(0.5, 0.3) for _ in range(count))),
            ).reward
            for _ in range(50)
        ]
        slopes.append(sum(found) / 50)
    assert slopes[0] > slopes[1] > slopes[2]
    assert slopes[2] < 0.1


@pytest.mark.parametrize("values", [(), (0.5,), (None, 0.5, None), (0.5, 0.5, 0.5)])
def test_where_nothing_is_known_the_slope_is_one_and_the_residual_zero(
    values: tuple[float | None, ...],
) -> None:
    control = control_of(slices(*values), slices(*values))
    assert (control.reward, control.residual.reward) == (1.0, 0.0)


def test_a_slice_without_a_reward_is_no_neighbour() -> None:
    control = control_of(slices(0.1, None, 0.9, 0.5), slices(0.9, 0.1, 0.9, 0.5))
    assert control.reward == pytest.approx(1.0)


def test_slices_that_the_twin_was_not_asked_of_say_nothing_of_it() -> None:
    found = control_variate.control_of(neighbours_in(map(Measured, slices(0.1, 0.9, 0.2))))
    assert (found.reward, found.residual.reward) == (1.0, 0.0)
    assert found.residual.attainment == {"default short": 0.0}
