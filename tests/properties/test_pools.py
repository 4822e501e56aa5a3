"""Routing over any number of pools with any contexts and costs, at the level of events.

- `sends_to_the_smallest_that_fits`: a request goes to the pool with the shortest context that holds it, and
  of equal pools to the cheapest; if that one has no capacity, to the next that holds it.
- `sends_only_to_pools_that_fit`: never to another pool, whatever is full.
- `two_pools_as_before`: two pools are served as by the rule for exactly two.
- `finds_the_pool_that_accepts_it`: without known contexts, rejections lead to a pool that fits.
"""

import math
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.commands import Command
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import DispatchFailed, DispatchFailure, Finished
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.replica import UNREPORTED_CONTEXT
from serve_app.errors import Outcome
from serve_app.request import Usage
from tests.builders import ManualDriver, concluded, dispatched, request
from tests.core.routing.test_pools import as_two_pools_were_routed, estimate

OUTPUT = 10
# Requests that a replica accepts before its next report.
ROOM = BackpressureSettings().target_waiting

contexts = st.lists(st.integers(50, 20_000), min_size=1, max_size=7).map(sorted)
# Few different contexts, so that costs decide.
alike = st.lists(st.sampled_from([500, 4_000, 16_000]), min_size=1, max_size=7).map(sorted)
costs = st.lists(st.floats(0.1, 10.0), min_size=7, max_size=7)
prompts = st.lists(st.integers(1, 21_000), min_size=1, max_size=30)


def fleet(limits: list[int], costs: list[float], **routing: Any) -> ManualDriver:
    """Return one replica per pool; pools are named by position."""
    pools = tuple(f"p{place}" for place in range(len(limits)))
    settings = RoutingSettings(
        pools=pools, **{"b_short_tokens": limits[0], "costs": tuple(costs[: len(pools)]), **routing}
    )
    driver = ManualDriver(routing=settings)
    for pool, limit in zip(pools, limits, strict=True):
        driver.join(f"{pool}/1", pool, max_model_len=limit, kv_tokens=None, max_num_seqs=None)
    return driver


def sent_to(commands: list[Command]) -> list[str]:
    """Return the pools of the dispatched requests."""
    return [replica_id.partition("/")[0] for _, replica_id in dispatched(commands)]


@given(limits=contexts | alike, costs=costs, prompts=prompts)
def test_sends_to_the_smallest_that_fits(limits: list[int], costs: list[float], prompts: list[int]) -> None:
    driver, sent = fleet(limits, costs), Counter[str]()
    ranked = sorted(range(len(limits)), key=lambda place: (limits[place], costs[place], place))
    for number, prompt_tokens in enumerate(prompts):
        commands = driver.arrive(f"r{number}", prompt_tokens=prompt_tokens, max_output_tokens=OUTPUT)
        fitting = [f"p{place}" for place in ranked if prompt_tokens + OUTPUT <= limits[place]]
        open_pools = [pool for pool in fitting if sent[pool] < ROOM]
        found = sent_to(commands)
        assert found == (open_pools[:1] if fitting else found)
        # If the budget exceeds every pool, the request goes to the longest, where its prompt may still fit.
        assert fitting or not found or prompt_tokens < limits[-1]
        sent.update(found)
        if fitting and not found:
            # The next one may wait behind it.
            return


@given(
    limits=contexts | alike,
    costs=costs,
    prompts=prompts,
    b_short=st.floats(0.0, 1.0),
    spill=st.booleans(),
)
def test_sends_only_to_pools_that_fit(
    limits: list[int], costs: list[float], prompts: list[int], b_short: float, spill: bool
) -> None:
    driver = fleet(limits, costs, b_short_tokens=max(1, math.floor(b_short * limits[0])), spill=spill)
    for number, prompt_tokens in enumerate(prompts):
        driver.arrive(f"r{number}", prompt_tokens=prompt_tokens, max_output_tokens=OUTPUT)
        # Capacity becomes free, so that queued requests are dispatched.
        commands = [*driver.feed(Finished("r0", Outcome.COMPLETED)), *driver.report("p0/1", received=None)]
        for request_id, replica_id in dispatched(commands):
            limit = limits[int(replica_id.partition("/")[0].removeprefix("p"))]
            budget = driver.find(request_id).estimate.budget_tokens
            assert budget <= limit or (limit == limits[-1] and budget > limits[-1])


@given(
    short=st.integers(50, 5_000),
    beyond=st.integers(0, 5_000),
    b_short=st.floats(0.0, 1.0),
    prompts=prompts,
    spill=st.booleans(),
)
def test_two_pools_as_before(
    short: int, beyond: int, b_short: float, prompts: list[int], spill: bool
) -> None:
    border = max(1, math.floor(b_short * short))
    limits = {"short": short, "long": short + beyond}
    driver = ManualDriver(routing=RoutingSettings(b_short_tokens=border, spill=spill))
    for pool, limit in limits.items():
        driver.join(f"{pool}/1", pool, max_model_len=limit, kv_tokens=None, max_num_seqs=None)
    sent = Counter[str]()
    for number, prompt_tokens in enumerate(prompts):
        wanted = request(f"r{number}", prompt_tokens=prompt_tokens, max_output_tokens=OUTPUT)
        before = as_two_pools_were_routed(
            dict(limits), wanted, estimate(prompt_tokens, OUTPUT), 0, spill=spill, b_short_tokens=border
        )
        commands = driver.arrive(f"r{number}", prompt_tokens=prompt_tokens, max_output_tokens=OUTPUT)
        open_pools = [pool for pool in before if sent[pool] < ROOM]
        assert sent_to(commands) == open_pools[:1]
        assert concluded(commands) == ([] if before else [(f"r{number}", "rejected_too_long")])
        sent.update(open_pools[:1])
        if before and not open_pools:
            return


@given(
    limits=st.lists(st.integers(50, 20_000), min_size=1, max_size=5),
    reported=st.lists(st.booleans(), min_size=5, max_size=5),
    states=st.booleans(),
    prompts=st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
)
def test_finds_the_pool_that_accepts_it(
    limits: list[int], reported: list[bool], states: bool, prompts: list[int]
) -> None:
    # Only pools that report a context are ordered.
    known = [
        limit if is_reported else UNREPORTED_CONTEXT
        for limit, is_reported in zip(limits, reported, strict=False)
    ]
    places = sorted(range(len(limits)), key=lambda place: known[place])
    limits, known = [limits[place] for place in places], [known[place] for place in places]
    driver = fleet(known, [1.0] * len(limits), b_short_tokens=20_010)
    rejected = Counter[tuple[str, int]]()
    for number, prompt_tokens in enumerate(prompts):
        request_id = f"r{number}"
        commands = driver.arrive(request_id, prompt_tokens=prompt_tokens, max_output_tokens=OUTPUT)
        while (scheduled := driver.scheduler.find(request_id)) is not None:
            replica_id = scheduled.replica_id
            assert replica_id is not None
            limit = limits[int(replica_id.partition("/")[0].removeprefix("p"))]
            if prompt_tokens + OUTPUT <= limit:
                usage = Usage(prompt_tokens=prompt_tokens, output_tokens=OUTPUT)
                commands = driver.feed(Finished(request_id, Outcome.COMPLETED, usage))
                continue
            rejected[replica_id, prompt_tokens] += 1
            failed = DispatchFailed(
                request_id, replica_id, DispatchFailure.TOO_LONG, "", limit if states else None
            )
            commands = driver.feed(failed)
        fits_somewhere = prompt_tokens + OUTPUT <= max(limits)
        assert concluded(commands) == [
            (request_id, "completed" if fits_somewhere else "rejected_too_long")
        ], (limits, known)
        for place in range(len(limits)):
            driver.report(f"p{place}/1", received=None)
    if max(prompts) + OUTPUT <= max(limits):
        # Each pool rejects a request at most once if a longer pool accepts it.
        assert max(rejected.values(), default=0) <= 1
