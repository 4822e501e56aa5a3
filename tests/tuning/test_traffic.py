import statistics

import numpy as np
import pytest

from serve_app.errors import Outcome
from serve_app.lab.workloads import Trace, TraceRequest
from serve_app.request import PriorityClass
from serve_app.tuning.digital_twin import TrafficLog, resampled
from tests.core.metrics.builders import record


def trace(count: int, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(0.1, count))
    return Trace(
        name="t",
        source="drawn",
        requests=tuple(
            TraceRequest(arrival_s=float(at), prompt_tokens=number + 1, output_tokens=5)
            for number, at in enumerate(times)
        ),
    )


def test_a_window_is_made_of_blocks_of_consecutive_requests_with_their_gaps() -> None:
    source = trace(500)
    window = resampled(source, 210, 50, seed=1, number=3)
    assert len(window.requests) == 210
    assert window.requests[0].arrival_s == 0.0
    breaks = 0
    for before, after in zip(window.requests, window.requests[1:], strict=False):
        if after.prompt_tokens != before.prompt_tokens % 500 + 1:
            breaks += 1
        elif after.prompt_tokens > 1:
            place = after.prompt_tokens - 1
            gap = source.requests[place].arrival_s - source.requests[place - 1].arrival_s
            assert after.arrival_s - before.arrival_s == pytest.approx(gap)
    assert breaks <= 4


def test_windows_differ_by_number_and_seed_and_by_nothing_else() -> None:
    source = trace(500)
    windows = [
        resampled(source, 100, 20, seed=seed, number=number) for seed, number in ((1, 1), (1, 2), (2, 1))
    ]
    assert len({window.requests for window in windows}) == 3
    assert resampled(source, 100, 20, seed=1, number=1) == windows[0]


def test_windows_have_the_rate_of_the_traffic_on_average() -> None:
    source = trace(400)
    rates = [resampled(source, 300, 30, seed=0, number=number).rate_per_s for number in range(60)]
    assert source.rate_per_s is not None
    assert statistics.fmean(rate or 0.0 for rate in rates) == pytest.approx(source.rate_per_s, rel=0.05)


def test_every_request_is_drawn_about_as_often() -> None:
    source = trace(40)
    counts = np.zeros(40)
    for number in range(300):
        for one in resampled(source, 40, 10, seed=0, number=number).requests:
            counts[one.prompt_tokens - 1] += 1
    assert counts.min() > 0.7 * counts.mean()


def test_a_window_may_be_longer_than_the_traffic() -> None:
    assert len(resampled(trace(7), 30, 100, seed=0, number=0).requests) == 30


def test_the_log_records_what_a_twin_needs_by_arrival() -> None:
    log = TrafficLog()
    log.add(
        record(request_id="b", arrived_at=12.0, prompt_tokens=7, tenant="t2", priority=PriorityClass.BATCH)
    )
    log.add(record(request_id="a", arrived_at=10.0, prompt_tokens=5, output_tokens=3))
    found = log.trace(until=100.0)
    assert found is not None
    assert [(one.arrival_s, one.prompt_tokens, one.tenant) for one in found.requests] == [
        (0.0, 5, "default"),
        (2.0, 7, "t2"),
    ]
    assert found.requests[1].priority is PriorityClass.BATCH


def test_requests_after_the_oldest_open_one_are_left_out() -> None:
    log = TrafficLog()
    for at in (1.0, 2.0, 3.0):
        log.add(record(request_id=f"r{at}", arrived_at=at))
    found = log.trace(until=3.0)
    assert found is not None
    assert len(found.requests) == 2
    assert log.trace(until=1.0) is None


def test_old_requests_are_dropped() -> None:
    log = TrafficLog()
    for at in (0.0, 150.0, 160.0, 755.0):
        log.add(record(request_id=f"r{at}", arrived_at=at))
    found = log.trace(until=1e9)
    assert found is not None
    assert [one.arrival_s for one in found.requests] == [0.0, 595.0]


def test_an_answer_that_never_ended_is_as_long_as_one_to_a_prompt_of_its_length() -> None:
    log = TrafficLog()
    log.add(record(request_id="a", arrived_at=1.0, prompt_tokens=10, output_tokens=4))
    log.add(record(request_id="b", arrived_at=2.0, prompt_tokens=1_000, output_tokens=200))
    log.add(
        record(request_id="c", arrived_at=3.0, prompt_tokens=900, output_tokens=0, outcome=Outcome.EXPIRED)
    )
    log.add(record(request_id="d", arrived_at=4.0, outcome=Outcome.REJECTED_INVALID))
    found = log.trace(until=9.0)
    assert found is not None
    assert [one.output_tokens for one in found.requests] == [4, 200, 200]
