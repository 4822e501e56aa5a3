import numpy as np
import pytest

from serve_app.lab.simulation.run import (
    Disclosure,
    TraceChoice,
    choose_trace,
    requests_of,
    with_arrivals,
)
from serve_app.lab.workloads import Trace, TraceError, TraceRequest


def requests(*prompts: tuple[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    made = tuple(
        TraceRequest(arrival_s=0.0, prompt_tokens=tokens, output_tokens=1, prefix=prefix)
        for tokens, prefix in prompts
    )
    trace = Trace(name="t", source="s", requests=made)
    return [simulated.request.submission.prefix for simulated in requests_of(trace, Disclosure(), 16)]


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def test_prefixes_are_sent_to_the_scheduler_in_the_gateways_blocks() -> None:
    one, other, shorter = requests((1_300, (7, 8, 9)), (1_300, (7, 8, 3)), (1_000, (7, 8)))
    assert len(one) == 1_300 // 128
    assert common(one, other) == 1_024 // 128
    assert shorter == one[: 1_000 // 128]
    assert len(set(one) | set(other)) == 10 + 2


def test_a_trace_without_prefixes_has_no_blocks() -> None:
    assert requests((1_300, ()), (1_300, (7,))) == [(), requests((512, (7,)))[0]]


TRACE = choose_trace(TraceChoice(name="paper-mix", requests=4_000), 0)


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.mark.parametrize("pattern", ["poisson", "gamma:2", "on-off:40,30"])
def test_arrivals_change_and_requests_and_rate_stay(pattern: str) -> None:
    changed = with_arrivals(TRACE, pattern, rng())
    assert [one.prompt_tokens for one in changed.requests] == [one.prompt_tokens for one in TRACE.requests]
    assert changed.rate_per_s == pytest.approx(TRACE.rate_per_s, rel=0.25)
    times = [one.arrival_s for one in changed.requests]
    assert times == sorted(times)
    assert times != [one.arrival_s for one in TRACE.requests]
    assert pattern in changed.source


def test_gamma_arrivals_are_as_bursty_as_requested() -> None:
    gaps = np.diff([one.arrival_s for one in with_arrivals(TRACE, "gamma:3", rng()).requests])
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.15)


@pytest.mark.parametrize("pattern", ["tides", "gamma", "gamma:0", "on-off:3", "on-off:a,b", "poisson:2"])
def test_a_pattern_that_cannot_be_read_is_named(pattern: str) -> None:
    with pytest.raises(TraceError, match=pattern.partition(":")[0]):
        with_arrivals(TRACE, pattern, rng())
