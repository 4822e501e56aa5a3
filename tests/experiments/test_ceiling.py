"""The experiment that measures one scheduler: all events are counted, halted engines let requests wait."""

from experiments.ceiling.run import CeilingSettings, play
from experiments.common.experiment import Context


def test_each_kind_of_event_is_counted_and_halted_engines_let_requests_wait() -> None:
    settings = CeilingSettings(replicas=(4,), waiting=(300,), fill_requests=200, requests=300)
    events, waiting = play(settings, Context(jobs=1))
    assert events.figures["requests"] == 300
    assert events.figures["refused"] == 0
    for kind in ("arrival", "first token", "finish", "report"):
        assert events.figures["events_us"][kind]["mean"] > 0
    # Some of them are in the engines' batches.
    assert 0 < waiting.figures["waiting"] <= 500
    assert waiting.figures["last"]["requests"] == 200
