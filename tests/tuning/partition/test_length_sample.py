import json

import pytest

from serve_app.tuning.partition.length_sample import LengthSample


def test_the_last_lengths_are_kept_in_the_order_of_arrival() -> None:
    sample = LengthSample(capacity=3)
    sample.extend([5, 7, 7, 9])

    assert sample.lengths() == (7, 7, 9)
    assert (len(sample), sample.observed) == (3, 4)
    assert repr(sample) == "<LengthSample 3 of 4 observed>"


def test_the_most_recent_can_be_asked_for_alone() -> None:
    sample = LengthSample(capacity=10)
    sample.extend([1, 2, 3, 4])

    assert sample.lengths(last=2) == (3, 4)
    assert sample.lengths(last=9) == (1, 2, 3, 4)
    assert sample.lengths(last=0) == ()


def test_what_is_no_length_is_not_taken_in() -> None:
    sample = LengthSample()
    sample.extend([0, -4, 12])

    assert sample.lengths() == (12,)
    assert sample.observed == 1


def test_a_sample_survives_being_written_to_a_file() -> None:
    sample = LengthSample(capacity=4)
    sample.extend(range(1, 11))
    restored = LengthSample(capacity=4)
    restored.restore(json.loads(json.dumps(sample.state())))

    restored.add(11)

    assert restored.lengths() == (8, 9, 10, 11)
    assert restored.observed == 11


def test_a_smaller_ring_takes_the_last_of_a_larger_one() -> None:
    sample = LengthSample(capacity=5)
    sample.extend([1, 2, 3, 4, 5])
    smaller = LengthSample(capacity=2)
    smaller.restore(sample.state())

    assert smaller.lengths() == (4, 5)
    assert smaller.observed == 5


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"lengths": [1, 2]},
        {"lengths": "12", "observed": 2},
        {"lengths": [1, 0], "observed": 2},
        {"lengths": [1, 2.5], "observed": 2},
        {"lengths": [1, True], "observed": 2},
        {"lengths": [1, 2], "observed": 1},
        {"lengths": [1, 2], "observed": None},
    ],
)
def test_damaged_state_is_refused_and_nothing_is_taken_over(damaged: dict[str, object]) -> None:
    sample = LengthSample()
    sample.extend([3, 4])

    with pytest.raises(ValueError, match="learned state"):
        sample.restore(damaged)

    assert sample.lengths() == (3, 4)
    assert sample.observed == 2


def test_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        LengthSample(capacity=0)
