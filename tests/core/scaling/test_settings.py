import pytest

from serve_app.core.scaling import AutoscalingSettings, ScaledPool, ScalingSettings


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"min_replicas": 2, "max_replicas": 1}, "got min 2, initial None, max 1"),
        ({"initial_replicas": 0}, "got min 1, initial 0, max 1"),
        ({"initial_replicas": 3, "max_replicas": 2}, "got min 1, initial 3, max 2"),
    ],
)
def test_bounds_that_contradict_each_other_are_rejected(bounds: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoscalingSettings(**bounds)


def test_a_pool_begins_with_its_minimum_unless_another_number_is_given() -> None:
    assert AutoscalingSettings(min_replicas=0, max_replicas=4).first_replicas == 0
    assert AutoscalingSettings(min_replicas=0, initial_replicas=2, max_replicas=4).first_replicas == 2


def test_a_budget_below_the_minimum_of_the_pools_is_rejected() -> None:
    pool = ScaledPool(autoscaling=AutoscalingSettings(min_replicas=2, max_replicas=4), gpus=4.0)
    assert ScalingSettings(pools={"long": pool}, gpu_budget=8).gpu_budget == 8
    with pytest.raises(ValueError, match="gpu_budget of 6 is below the 8 GPUs"):
        ScalingSettings(pools={"long": pool}, gpu_budget=6)


def test_pools_of_a_fixed_size_count_as_their_size() -> None:
    with pytest.raises(ValueError, match="gpu_budget of 6 is below the 8 GPUs"):
        ScalingSettings(pools={"long": ScaledPool(replicas=2, gpus=4.0)}, gpu_budget=6)
