"""Causes of the longest gap of a stream, from a real scheduler on a manual clock."""

import pytest

from serve_app.core import events as ev
from serve_app.core.commands import Conclude, Dispatch
from serve_app.errors import Outcome
from serve_app.request import DecodeGap, Usage
from serve_app.serving.scheduler.journal import Entry, Journal, RequestHistory, Stall, StallCause
from serve_app.serving.scheduler.metrics import DecodeStalls, SchedulerMetrics
from tests.builders import ManualDriver, one_replica, request

USAGE = Usage(prompt_tokens=50, output_tokens=5)


class Observed:
    """A scheduler whose events reach the history and the observer of gaps."""

    def __init__(self) -> None:
        self.driver: ManualDriver = one_replica(limits={"kv_tokens": 100_000, "max_model_len": 50_000})
        self.history = RequestHistory(lambda _pool, _tokens: 0.0)
        self.metrics = SchedulerMetrics("m")
        self.journal = Journal(pytest.fail)
        self.journal.subscribe(self.history, DecodeStalls("m", self.history, self.metrics.decode_gaps))

    def feed(self, event: ev.Event, *, after_s: float = 0.0) -> None:
        self.driver.report("r1", after_s=after_s)
        commands, core = self.driver.feed(event), self.driver.scheduler
        entry = Entry(core, self.driver.now, event, commands)
        if isinstance(event, ev.Arrived):
            entry.scheduled = core.find(event.request.request_id)
        elif isinstance(event, ev.FirstToken):
            entry.scheduled = core.find(event.request_id)
        for command in commands:
            if isinstance(command, Dispatch):
                entry.requests.append(self.driver.find(command.request_id))
            elif isinstance(command, Conclude):
                entry.requests.append(core.ended[command.request_id])
        self.journal.append(entry)

    def arrive(self, name: str, prompt_tokens: int = 40, *, after_s: float = 0.0) -> None:
        self.driver.now += after_s
        self.feed(ev.Arrived(request(name, prompt_tokens=prompt_tokens, arrived_at=self.driver.now)))

    def end(self, name: str, gap: DecodeGap | None, *, after_s: float = 0.0) -> Stall | None:
        self.feed(ev.Finished(name, Outcome.COMPLETED, USAGE, None, gap), after_s=after_s)
        known = self.history.find(name)
        assert known is not None
        return known.stall


@pytest.fixture
def observed() -> Observed:
    """Return a running stream that has had its first token."""
    observed = Observed()
    observed.arrive("stream")
    observed.feed(ev.FirstToken("stream"), after_s=0.1)
    return observed


def test_a_gap_beside_prefills_has_the_longest_of_them_as_its_cause(observed: Observed) -> None:
    observed.arrive("short", 300, after_s=1.0)
    observed.arrive("long", 20_000)
    observed.feed(ev.FirstToken("short"), after_s=0.2)
    observed.feed(ev.FirstToken("long"), after_s=0.5)
    # From 0.1 s after the dispatch of the two until 0.4 s after it.
    stall = observed.end("stream", DecodeGap(0.3, 1.3), after_s=1.0)
    assert stall == Stall(0.3, StallCause.PREFILL, 20_000)


def test_a_prefill_that_still_runs_counts(observed: Observed) -> None:
    observed.arrive("long", 20_000, after_s=1.0)
    assert observed.end("stream", DecodeGap(0.3, 0.1), after_s=0.5) == Stall(0.3, StallCause.PREFILL, 20_000)


@pytest.mark.parametrize("ended_ago_s", [0.2, 3.0])
def test_prefills_before_and_after_a_gap_do_not_count(observed: Observed, ended_ago_s: float) -> None:
    observed.arrive("long", 20_000, after_s=2.0)
    observed.feed(ev.FirstToken("long"), after_s=0.5)
    stall = observed.end("stream", DecodeGap(0.3, ended_ago_s), after_s=1.0)
    assert stall == Stall(0.3, StallCause.OTHER)


def test_a_prefill_that_was_put_back_does_not_count(observed: Observed) -> None:
    observed.arrive("long", 20_000, after_s=1.0)
    observed.feed(ev.DispatchFailed("long", "r1", ev.DispatchFailure.LOST))
    assert observed.end("stream", DecodeGap(0.3, 0.1), after_s=0.5) == Stall(0.3, StallCause.OTHER)


def test_without_a_prefill_a_full_cache_is_the_cause(observed: Observed) -> None:
    finished = ev.Finished("stream", Outcome.COMPLETED, USAGE, None, DecodeGap(0.3, 0.1))
    observed.driver.report("r1", kv_usage_ratio=0.99, after_s=1.0)
    commands, core = observed.driver.feed(finished), observed.driver.scheduler
    entry = Entry(core, observed.driver.now, finished, commands, requests=[core.ended["stream"]])
    observed.journal.append(entry)
    known = observed.history.find("stream")
    assert known is not None
    assert known.stall == Stall(0.3, StallCause.KV_CACHE)


def test_gaps_are_counted_by_cause_and_an_answer_without_one_is_not(observed: Observed) -> None:
    observed.arrive("whole")
    assert observed.end("whole", None) is None
    observed.end("stream", DecodeGap(0.3, 0.1), after_s=1.0)
    text = observed.metrics.exposition([])
    assert 'ewsjf_longest_gap_seconds_count{cause="other",model="m",pool="only"} 1.0' in text
    assert "ewsjf_longest_gap_seconds_sum" in text
    assert 'cause="prefill"' not in text
