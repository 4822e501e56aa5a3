import pytest

from serve_app.core.routing.observed import LearnedBatch
from serve_app.core.routing.replica import ReplicaReport


def learned(*loads: tuple[int | None, int | None, float | None]) -> int | None:
    """Return the batch limit learned from reports of (waiting, running, KV use)."""
    batch = LearnedBatch()
    for waiting, running, usage in loads:
        batch.observe(ReplicaReport(received=0, waiting=waiting, running=running, kv_usage_ratio=usage))
    return batch.size


@pytest.mark.parametrize(
    ("loads", "size"),
    [
        pytest.param([(2, 16, 0.5)] * 5, 16, id="a plateau with a queue"),
        pytest.param([(2, 16, 0.5)] * 4, None, id="four reports are too few"),
        pytest.param([(2, running, 0.5) for running in range(1, 12)], None, id="a batch that still grows"),
        pytest.param([(2, 16, None)] * 5, 16, id="an unknown use of the cache"),
    ],
)
def test_a_plateau_with_a_queue_is_the_size_of_the_batch(
    loads: list[tuple[int, int, float | None]], size: int | None
) -> None:
    assert learned(*loads) == size


@pytest.mark.parametrize("load", [(0, 16, 0.5), (2, 16, 0.95), (None, 16, 0.5), (2, None, 0.5), (2, 0, 0.0)])
def test_without_a_queue_or_with_a_full_cache_nothing_is_learned(
    load: tuple[int | None, int | None, float | None],
) -> None:
    assert learned(*[load] * 9) is None


def test_a_batch_limit_that_proves_too_low_is_dropped() -> None:
    held_back = [(2, 5, 0.5)] * 5
    assert learned(*held_back) == 5
    assert learned(*held_back, (1, 6, 0.5)) is None
    assert learned(*held_back, *[(1, 6, 0.5)] * 5) == 6
