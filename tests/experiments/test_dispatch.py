"""The experiment that measures the scheduler's own cost: it measures whole requests of full fleets."""

import pytest

from experiments.common.experiment import Context
from experiments.dispatch.run import DispatchSettings, play


@pytest.mark.slow
def test_every_request_of_a_window_is_counted_from_arrival_to_end() -> None:
    settings = DispatchSettings(replicas=(2, 4), places=8, requests=400, windows=2)
    rows = list(play(settings, Context(jobs=1)))
    assert {(row.key["decider"], row.key["replicas"]) for row in rows} == {
        (decider, replicas)
        for decider in (
            *("ewsjf, affinity", "ewsjf, by load", "fcfs, affinity", "fcfs, by load"),
            *("round robin", "power of two", "scan"),
        )
        for replicas in (2, 4)
    }
    for row in rows:
        figures = row.figures
        assert figures["submitted"] == 800
        # Who waits at one end of a window leaves in another one; the fleets hold 16 and 32 requests.
        assert abs(figures["dispatched"] - figures["submitted"]) <= 32
        assert 0.6 < figures["taken"] <= 1.1, row.key
        parts = [
            figures["events_us"][kind]["p50"] for kind in ("submit", "dispatch", "first token", "finish")
        ]
        mean_us = sum(figures["request_us"]) / len(figures["request_us"])
        assert sum(parts) == pytest.approx(mean_us, rel=0.5)
        assert (figures["of_smallest"] == [1, 1]) is (row.key["replicas"] == 2)


def test_it_refuses_a_decider_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no decider 'lottery': there are ewsjf, affinity"):
        DispatchSettings(replicas=(2,), deciders=("lottery",))
