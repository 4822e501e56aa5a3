import pytest

from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.serving.scheduler import tuning_endpoint
from serve_app.serving.scheduler.tuning_endpoint import LearnedQueues, PartitionUpdate

ONE = Partition((LengthInterval(min_tokens=1, max_tokens=9, mean_tokens=4.0, count=2),))


def test_lengths_are_taken_once_in_the_order_of_arrival() -> None:
    queues = LearnedQueues()
    for length in (5, 3, 9):
        queues.on_arrival(length)
    assert queues.take() == [5, 3, 9]
    assert queues.take() == []


def test_lengths_that_are_not_pulled_do_not_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_endpoint, "_KEPT", 10)
    queues = LearnedQueues()
    for length in range(15):
        queues.on_arrival(length)
    taken = queues.take()
    assert (len(taken), taken[0]) == (10, 5)


def test_queues_are_as_old_as_when_they_were_learned_elsewhere() -> None:
    queues = LearnedQueues()
    assert (len(queues), queues.age_s(100.0)) == (0, None)
    queues.on_change(
        PartitionUpdate(partition=ONE, reason="restored", lengths=2, distance=0.1, age_s=30.0), 100.0
    )
    assert (len(queues), queues.age_s(107.0)) == (1, 37.0)
