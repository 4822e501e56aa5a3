"""Ceiling of one scheduler: all events are counted, and the backlog stays constant."""

from experiments.ceiling.run import CeilingSettings, play
from experiments.common.experiment import Context


def test_each_kind_of_event_is_counted_and_a_backlog_stays_constant() -> None:
    settings = CeilingSettings(
        replicas=(4,),
        waiting=(300,),
        waiting_replicas=4,
        fill_requests=200,
        requests=300,
    )
    events, waiting = play(settings, Context(jobs=1))
    for row in (events, waiting):
        assert row.figures["requests"] == 300
        assert row.figures["rejected"] == 0
        for kind in ("arrival", "first token", "finish", "report"):
            assert row.figures["events_us"][kind]["mean"] > 0
    # Arrivals replace dispatched requests. The last event may dispatch several, and nothing arrives after it.
    assert 295 <= waiting.figures["waiting"] <= 300
