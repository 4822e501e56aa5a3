"""Learned gaps: the time for which a context is retained."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.programs.residency import Gaps, GapTimes
from serve_app.request import TurnEnd

# All gaps end in the bin from 0.71 to 1 s, in the middle of which they count.
SOON = ((1.0, 0.9),)
# Half of them do, and the other conversations do not return.
HALF_SOON = ((0.5, 0.9),)


@pytest.mark.parametrize(
    ("prior", "recompute_s", "expected_s"),
    [
        # E[min(G, 1)] = 0.71 + 0.29 / 2 = 0.85.
        (SOON, 0.79, 0.0),
        (SOON, 1.0, 1.0),
        # E[min(G, 1)] = 0.71 + 0.29 * 3/4 = 0.93, which is less than half of the recomputation above 1.85 s.
        (HALF_SOON, 1.6, 0.0),
        (HALF_SOON, 2.0, 1.0),
    ],
)
def test_a_context_is_retained_as_long_as_that_costs_less_than_computing_it(
    prior: tuple[tuple[float, float], ...], recompute_s: float, expected_s: float
) -> None:
    assert GapTimes(prior).retention_s(recompute_s, price=1.0) == expected_s


@pytest.mark.parametrize("ending", list(TurnEnd))
def test_a_context_that_is_cheap_to_compute_is_not_retained_in_a_long_gap(ending: TurnEnd) -> None:
    assert Gaps().after(ending).retention_s(0.1, price=1.0) == 0.0


def test_a_context_is_retained_after_calls_of_tools_sooner_than_after_an_answer() -> None:
    gaps = Gaps()
    after_tools = gaps.after(TurnEnd.TOOLS).retention_s(5.0, price=1.0)
    assert after_tools > gaps.after(TurnEnd.DONE).retention_s(5.0, price=1.0)
    assert gaps.after(None).retention_s(5.0, price=1.0) == after_tools


def test_only_the_ratio_of_the_costs_matters() -> None:
    gaps = Gaps().after(TurnEnd.TOOLS)
    assert gaps.retention_s(20.0, price=1.0) == gaps.retention_s(5.0, price=0.25)


@given(
    gaps=st.lists(st.sampled_from([0.01, 0.3, 2.0, 50.0, 1e5, math.inf]), max_size=60),
    costs=st.tuples(st.floats(1e-3, 1e4), st.floats(1e-3, 1e4)),
)
def test_retains_longer_what_costs_more(gaps: list[float], costs: tuple[float, float]) -> None:
    times = GapTimes(HALF_SOON)
    for gap_s in gaps:
        times.observe(gap_s)
    cheap, dear = sorted(costs)
    assert 0.0 <= times.retention_s(cheap, price=1.0) <= times.retention_s(dear, price=1.0)


def test_the_retention_follows_the_observed_gaps() -> None:
    times = Gaps().after(TurnEnd.TOOLS)
    assert times.retention_s(1.0, price=1.0) == 0.0
    for _ in range(400):
        times.observe(0.3)
    assert times.retention_s(1.0, price=1.0) == pytest.approx(2**-1.5)
    for _ in range(2_000):
        times.observe(math.inf)
    assert times.retention_s(1.0, price=1.0) == 0.0


def test_the_two_ways_of_ending_are_learned_apart() -> None:
    gaps = Gaps()
    after_tools = gaps.after(TurnEnd.TOOLS).retention_s(1.0, price=1.0)
    for _ in range(400):
        gaps.after(TurnEnd.DONE).observe(0.3)
    assert gaps.after(TurnEnd.DONE).retention_s(1.0, price=1.0) > 0.0
    assert gaps.after(TurnEnd.TOOLS).retention_s(1.0, price=1.0) == after_tools
    assert repr(gaps) == "<Gaps after tools <GapTimes n=0>, otherwise <GapTimes n=400>>"
