import math
import statistics

import pytest

from serve_app.tuning.search.comparison import compare


def by_window(*rewards: float | None) -> dict[int, float | None]:
    return dict(enumerate(rewards))


def test_the_interval_is_of_the_paired_difference() -> None:
    found = compare(by_window(1.2, 5.1, 9.3), by_window(1.0, 5.0, 9.0))
    assert found.mean == pytest.approx(0.2)
    # Student's t with two degrees of freedom.
    half = 4.303 * statistics.stdev([0.2, 0.1, 0.3]) / math.sqrt(3)
    assert found.low == pytest.approx(0.2 - half)
    assert found.high == pytest.approx(0.2 + half)
    assert not found.is_win


def test_the_same_gain_everywhere_is_a_win_and_the_same_loss_is_none() -> None:
    assert compare(by_window(2.0, 3.0), by_window(1.0, 2.0)).is_win
    worse = compare(by_window(1.0, 2.0), by_window(2.0, 3.0))
    assert (worse.low, worse.high, worse.is_win) == (-1.0, -1.0, False)


def test_a_tie_is_no_win() -> None:
    assert not compare(by_window(1.0, 1.0, 1.0), by_window(1.0, 1.0, 1.0)).is_win


def test_one_window_cannot_tell() -> None:
    found = compare(by_window(9.0), by_window(1.0))
    assert (found.mean, found.low, found.is_win) == (8.0, None, False)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, -math.inf])
def test_a_missing_reward_is_no_win(reward: float | None) -> None:
    found = compare(by_window(9.0, 9.0, reward), by_window(1.0, 1.0, 1.0))
    assert (found.windows, found.missing, found.is_win) == (2, 1, False)
    assert not compare(by_window(9.0, 9.0, 9.0), by_window(1.0, 1.0, reward)).is_win


def test_windows_that_nobody_else_played_are_missing() -> None:
    assert compare(by_window(1.0, 2.0), {0: 0.0}).missing == 1


def test_more_windows_than_there_is_traffic_make_nothing_surer() -> None:
    rewards = [0.1, 0.3, 0.2, 0.4, 0.1, 0.3, 0.2, 0.4]
    zeros = [0.0] * len(rewards)
    wide = compare(by_window(*rewards), by_window(*zeros), independent_windows=2)
    narrow = compare(by_window(*rewards), by_window(*zeros), independent_windows=100)
    assert wide.low is not None
    assert narrow.low is not None
    assert wide.mean - wide.low == pytest.approx(2 * (narrow.mean - narrow.low))
