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


def test_a_length_below_one_is_ignored() -> None:
    sample = LengthSample()
    sample.extend([0, -4, 12])

    assert sample.lengths() == (12,)
    assert sample.observed == 1


def test_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        LengthSample(capacity=0)
