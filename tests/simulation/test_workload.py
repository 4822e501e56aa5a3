from serve_app.simulation.workload import Disclosure, requests_of
from serve_app.workloads.trace import Trace, TraceRequest


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


def test_prefixes_are_told_to_the_scheduler_in_the_gateways_blocks() -> None:
    one, other, shorter = requests((1_300, (7, 8, 9)), (1_300, (7, 8, 3)), (1_000, (7, 8)))
    assert len(one) == 1_300 // 128
    assert common(one, other) == 1_024 // 128
    assert shorter == one[: 1_000 // 128]
    assert len(set(one) | set(other)) == 10 + 2


def test_what_a_trace_says_nothing_of_has_no_blocks() -> None:
    assert requests((1_300, ()), (1_300, (7,))) == [(), requests((512, (7,)))[0]]
