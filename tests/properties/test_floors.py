"""What floors guarantee, in random histories of one busy engine."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.accounting.wait_causes import WaitCause
from serve_app.core.commands import Command, Dispatch
from serve_app.core.events import Event
from serve_app.core.queueing.floors import FloorSettings
from serve_app.request import PriorityClass
from tests.properties.test_tenant_waits import LARGEST_S, TOKENS_PER_S, Arrival, SerialEngine, service_s

UNTIL_S = 60.0


def received(engine: SerialEngine, tenant: str, since: float, until: float) -> float:
    """Return the service that a tenant gets between two times."""
    return TOKENS_PER_S * sum(
        service_s(one.prompt_tokens)
        for one in engine.order
        if one.tenant == tenant and since <= one.sent_at < until
    )


def backlog(tenant: str, prompt_tokens: int, at: float = 0.0, until: float = UNTIL_S) -> list[Arrival]:
    """Return requests that keep a tenant backlogged even with the whole engine."""
    count = 2 + int((until - at) / service_s(prompt_tokens))
    return [Arrival(at, tenant, prompt_tokens) for _ in range(count)]


lengths = st.integers(50, 4_000)
others = st.lists(
    st.builds(
        Arrival,
        at=st.floats(0.0, 50.0),
        tenant=st.sampled_from(["x", "y", "z"]),
        prompt_tokens=lengths,
        priority=st.sampled_from(list(PriorityClass)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(others, st.floats(50.0, 850.0), lengths)
def test_a_tenant_with_queued_requests_gets_its_floor_over_any_half_minute(
    others: list[Arrival], floor: float, prompt_tokens: int
) -> None:
    flood = [Arrival(0.0, "flood", 1_000, PriorityClass.INTERACTIVE) for _ in range(80)]
    engine = SerialEngine(
        [*backlog("team", prompt_tokens), *others, *flood], floors=FloorSettings(tenants={"team": floor})
    )
    engine.run()
    # The request that is served when the tenant falls behind, one in the usual order, and one of its own that
    # it got before the half minute.
    less = floor * 2 * LARGEST_S + TOKENS_PER_S * service_s(prompt_tokens)
    for one in engine.order:
        if one.sent_at <= UNTIL_S - 30.0:
            got = received(engine, "team", one.sent_at, one.sent_at + 30.0)
            assert got >= 30.0 * floor - less


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(100.0, 900.0), st.integers(500, 4_000)), min_size=2, max_size=4))
def test_floors_that_cannot_be_kept_get_the_same_part_of_each(floors: list[tuple[float, int]]) -> None:
    total = sum(floor for floor, _ in floors)
    tenants = {f"team-{number}": floor * 2_000.0 / total for number, (floor, _) in enumerate(floors)}
    arrivals = [
        one for name, (_, tokens) in zip(tenants, floors, strict=True) for one in backlog(name, tokens)
    ]
    engine = SerialEngine(
        [*arrivals, *backlog("other", 500)], floors=FloorSettings(tenants=tenants), max_waiting=1_000
    )
    engine.run()
    got = {name: received(engine, name, 0.0, UNTIL_S) for name in (*tenants, "other")}
    for name, floor in tenants.items():
        assert got[name] == pytest.approx(0.45 * floor * UNTIL_S, abs=3 * TOKENS_PER_S * LARGEST_S)
    # The usual order has a tenth, in which all five tenants have equal shares.
    assert got["other"] >= 0.1 * UNTIL_S * TOKENS_PER_S / (len(tenants) + 1) - TOKENS_PER_S * LARGEST_S


def test_a_floor_is_lent_while_it_is_not_used_and_returns_at_once() -> None:
    flood = backlog("flood", 1_000)
    late = [Arrival(20.0, "team", 500) for _ in range(40)]
    engine = SerialEngine([*flood, *late], floors=FloorSettings(tenants={"team": 600.0}))
    engine.run()
    assert received(engine, "flood", 0.0, 20.0) >= 20.0 * TOKENS_PER_S
    team = [one for one in engine.order if one.tenant == "team"]
    assert team[0].sent_at <= 20.0 + service_s(1_000)
    assert received(engine, "team", 20.0, 40.0) == pytest.approx(20.0 * 600.0, rel=0.1)


def test_the_floor_of_a_class_passes_higher_classes() -> None:
    flood = [Arrival(0.0, "flood", 1_000, PriorityClass.INTERACTIVE) for _ in range(80)]
    nightly = [Arrival(0.0, "nightly", 400, PriorityClass.BATCH) for _ in range(80)]
    engine = SerialEngine([*flood, *nightly], floors=FloorSettings(classes={PriorityClass.BATCH: 300.0}))
    engine.run()
    assert received(engine, "nightly", 0.0, 60.0) == pytest.approx(60.0 * 300.0, rel=0.1)


def test_single_requests_in_turn_get_no_more_than_the_floor_before_others() -> None:
    """A tenant whose queue is short cannot bend its floor by sending its requests one by one."""
    flood = [Arrival(0.0, f"user-{number}", 1_000) for number in range(80)]
    singles = [Arrival(float(at), "team", 480) for at in range(1, 60)]
    engine = SerialEngine([*flood, *singles], floors=FloorSettings(tenants={"team": 250.0}))
    engine.run()
    assert received(engine, "team", 0.0, 60.0) == pytest.approx(60.0 * 250.0, rel=0.15)


class Receipts(SerialEngine):
    """Keeps the causes of the wait of each dispatched request."""

    def __init__(self, arrivals: Sequence[Arrival], **changes: Any) -> None:
        self.causes: dict[str, dict[WaitCause, int]] = {}
        super().__init__(arrivals, **changes)

    def feed(self, event: Event, *, after_s: float = 0.0) -> list[Command]:
        commands = super().feed(event, after_s=after_s)
        for command in commands:
            if isinstance(command, Dispatch) and command.waited is not None:
                self.causes[command.request_id] = command.waited.causes
        return commands


def test_receipts_name_the_floor_of_others_and_not_that_of_the_own_tenant() -> None:
    team = [Arrival(0.0, "team", 980) for _ in range(12)]
    engine = Receipts([*team, Arrival(0.0, "user", 980)], floors=FloorSettings(tenants={"team": 2_000.0}))
    engine.run()
    # Nine requests of the floor and one in the usual order before the user's, a second each.
    assert engine.causes["user 12"].keys() == {WaitCause.OTHERS_FLOOR, WaitCause.ENGINES_BUSY}
    assert engine.causes["user 12"][WaitCause.OTHERS_FLOOR] >= 8e9
    assert engine.causes["team 11"].keys() == {
        WaitCause.OWN_REQUESTS,
        WaitCause.OTHER_TENANTS,
        WaitCause.ENGINES_BUSY,
    }
