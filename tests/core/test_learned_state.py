import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core import Scheduler
from serve_app.core.learned_state import learned_state, restore_state
from serve_app.request import PromptShape, Request, TextCategory, Usage
from tests import builders

shapes = st.builds(
    PromptShape,
    text_bytes=st.integers(0, 200_000),
    category=st.sampled_from(TextCategory),
    messages=st.integers(0, 40),
    tool_bytes=st.integers(0, 20_000),
    prompts=st.integers(1, 3),
)
requests = st.builds(
    builders.request,
    request_id=st.just("r"),
    shape=shapes,
    tenant=st.sampled_from(["a", "b", "großer \N{SNOWMAN}", ""]),
    max_output_tokens=st.none() | st.integers(0, 100_000),
    choices=st.integers(1, 4),
)
usages = st.builds(Usage, prompt_tokens=st.integers(0, 60_000), output_tokens=st.integers(0, 70_000))
# An example seen a hundred times is enough for learned lengths to be used.
observations = st.lists(st.tuples(requests, usages, st.sampled_from([1, 100])), max_size=12)
prefills = st.lists(st.tuples(st.integers(1, 32_000), st.floats(1e-4, 100.0)), max_size=60)


def scheduler() -> Scheduler:
    return Scheduler(builders.settings())


def trained_scheduler(
    observations: list[tuple[Request, Usage, int]], prefills: list[tuple[int, float]]
) -> Scheduler:
    core = scheduler()
    for request, usage, times in observations:
        for _ in range(times):
            core.estimator.observe(request, usage)
    for tokens, seconds in prefills:
        core.prefill_costs.observe("short", tokens, seconds)
    return core


@settings(max_examples=60)
@given(
    observations, prefills, st.lists(requests, min_size=1, max_size=5), st.lists(st.tuples(requests, usages))
)
def test_a_scheduler_restored_from_json_estimates_and_learns_like_the_original(
    observations: list[tuple[Request, Usage, int]],
    prefills: list[tuple[int, float]],
    asked: list[Request],
    later: list[tuple[Request, Usage]],
) -> None:
    first = trained_scheduler(observations, prefills)
    second = scheduler()
    document = json.loads(json.dumps(learned_state(first)))
    restore_state(second, document)
    assert learned_state(second) == learned_state(first)
    for request, usage in later:
        for core in (first, second):
            core.estimator.observe(request, usage)
            core.prefill_costs.observe("long", usage.prompt_tokens, 1.0)
    for request in asked:
        assert second.estimator.estimate(request) == first.estimator.estimate(request)
        for pool in ("short", "long"):
            costs = [core.prefill_costs.of(pool) for core in (first, second)]
            assert costs[0].seconds(request.shape.text_bytes) == costs[1].seconds(request.shape.text_bytes)


def test_a_snapshot_does_not_change() -> None:
    core = trained_scheduler(
        [(builders.request(), Usage(prompt_tokens=40, output_tokens=7), 60)], [(100, 1.0)]
    )
    document = learned_state(core)
    before = json.dumps(document)
    core.estimator.observe(builders.request(), Usage(prompt_tokens=40, output_tokens=70))
    core.prefill_costs.observe("short", 200, 3.0)
    assert json.dumps(document) == before


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("estimator",), None, "Expected `object`, got `null` - at `$.estimator`"),
        (("estimator", "version"), 99, "Invalid enum value 99 - at `$.estimator.version`"),
        (("estimator", "media", "mean"), "4", "Expected `float`, got `str` - at `$.estimator.media.mean`"),
        (("prefill_costs",), [], "Expected `object`, got `array` - at `$.prefill_costs`"),
        (("prefill_costs", "version"), 1, "Invalid enum value 1 - at `$.prefill_costs.version`"),
        (("prefill_costs", "shared", "sums"), [1.0], "of length >= 5 - at `$.prefill_costs.shared.sums`"),
        (("prefill_costs", "shared", "sums"), [1, 1, 1, 1, -1], "at `$.prefill_costs.shared.sums[4]`"),
        (("prefill_costs", "shared", "sums"), [0, 1, 1, 1, 1], "need observations, got [0.0, 1.0"),
        (("prefill_costs", "shared", "base_s"), 0.0, "> 0.0 - at `$.prefill_costs.shared.base_s`"),
        (("active_share",), 1.5, "<= 1.0 - at `$.active_share`"),
    ],
)
def test_a_document_of_another_shape_is_rejected(path: tuple[str, ...], value: object, reason: str) -> None:
    document: dict[str, Any] = json.loads(json.dumps(learned_state(scheduler())))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=re.escape(reason)):
        restore_state(scheduler(), document)
