import pytest

from serve_app.core.routing.observed import LearnedBatch
from serve_app.core.routing.replica import ReplicaReport


def learned(*loads: tuple[int | None, int | None, float | None]) -> int | None:
    """Return the batch limit learned from reports of (waiting, running, KV use)."""
    batch = LearnedBatch()
    for waiting, running, usage in loads:
        batch.observe(ReplicaReport(received=0, waiting=waiting, running=running, kv_usage_ratio=usage))
    return batch.size


def test_a_plateau_with_a_queue_is_the_size_of_the_batch() -> None:
    assert learned(*[(2, 16, 0.5)] * 5) == 16


def test_four_reports_are_too_few() -> None:
    assert learned(*[(2, 16, 0.5)] * 4) is None


@pytest.mark.parametrize("load", [(0, 16, 0.5), (2, 16, 0.95), (None, 16, 0.5), (2, None, 0.5), (2, 0, 0.0)])
def test_without_a_queue_or_with_a_full_cache_nothing_is_learned(
    load: tuple[int | None, int | None, float | None],
) -> None:
    assert learned(*[load] * 9) is None


def test_a_batch_that_still_grows_is_no_plateau() -> None:
    assert learned(*[(2, running, 0.5) for running in range(1, 12)]) is None


def test_an_unknown_use_of_the_cache_is_no_obstacle() -> None:
    assert learned(*[(2, 16, None)] * 5) == 16


def test_a_batch_limit_that_proves_too_low_is_dropped() -> None:
    held_back = [(2, 5, 0.5)] * 5
    assert learned(*held_back) == 5
    assert learned(*held_back, (1, 6, 0.5)) is None
    assert learned(*held_back, *[(1, 6, 0.5)] * 5) == 6
