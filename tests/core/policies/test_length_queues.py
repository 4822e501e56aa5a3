import itertools

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.policies.length_queues import LengthInterval, Partition, QueueMap, prior_partition


def queue_map(*bounds: tuple[int, int]) -> QueueMap:
    intervals = tuple(
        LengthInterval(min_tokens=low, max_tokens=high, mean_tokens=(low + high) / 2, count=5)
        for low, high in bounds
    )
    return QueueMap(Partition(intervals))


def test_algorithm_2_by_hand() -> None:
    queues = queue_map((100, 200), (1_000, 2_000))
    assert queues.route(150).name == "100-200"
    assert queues.route(220).name == "100-200"  # at most 10 % above the lower
    assert queues.route(900).name == "1000-2000"  # at most 10 % below the upper
    assert queues.route(500).name == "~450-550"  # a bubble as wide as the queue below
    assert queues.route(520).name == "~450-550"
    assert queues.route(5_000).name == "~4500-5500"
    assert len(queues) == 4


def test_bubbles_are_clipped_to_their_gap() -> None:
    queues = queue_map((100, 900), (1_200, 2_000))
    assert queues.route(1_000).name == "~901-1199"
    below_all = queue_map((1_000, 1_001))
    assert below_all.route(10).name == "~1-266"


def test_learned_queues_are_never_removed() -> None:
    queues = queue_map((100, 200), (1_000, 2_000))
    queues.route(500)
    for _ in range(31):
        queues.retire_bubbles(set())
    assert repr(queues) == "<QueueMap 100-200 1000-2000>"


def test_a_bubble_in_use_stays() -> None:
    queues = queue_map((100, 200), (1_000, 2_000))
    name = queues.route(500).name
    for _ in range(40):
        queues.retire_bubbles({name})
    assert len(queues) == 3


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=60))
def test_every_length_has_one_queue_and_queues_stay_in_order(lengths: list[int]) -> None:
    queues = queue_map((100, 200), (1_000, 2_000), (8_000, 8_000))
    for length in lengths:
        queue = queues.route(length)
        assert queues[queue.name] is queue
        assert queue.min_tokens * 0.9 <= length <= queue.max_tokens * 1.1
    assert all(a.min_tokens < b.min_tokens for a, b in itertools.pairwise(queues))


def test_the_prior_covers_all_lengths_without_gaps() -> None:
    queues = QueueMap(prior_partition())
    assert [queues.route(length).bubble for length in (1, 31, 32, 1_000, 65_536, 131_000)] == [False] * 6
