"""Replicas that can serve a request: each condition alone, and `fits` compared with `best`."""

import itertools

import pytest

from serve_app.core.routing.ledger import CapacityQuery, OpenReplicas, ReplicasByAdapter
from serve_app.core.routing.rate import DecayingRate
from serve_app.core.routing.replica_state import ReplicaState
from tests.builders import report, spec


class GivenBackpressure:
    """Backpressure with given limits."""

    def __init__(self) -> None:
        self.has_room, self.is_empty = True, True
        self.asked_at: float | None = None

    def admits(self, replica: ReplicaState, now: float) -> bool:
        self.asked_at = now
        return self.has_room and replica.joined

    def admits_backfill(self, replica: ReplicaState, now: float) -> bool:
        return self.is_empty and replica.joined

    def gates(self, replica: ReplicaState) -> bool:
        return replica.gated


def replica(*, free_tokens: int = 100, long_prefills: tuple[int, int] = (0, 0)) -> ReplicaState:
    starts = DecayingRate(10.0, 0.0)
    made = ReplicaState(spec("a"), 0, starts, kv_budget=free_tokens, long_prefills=long_prefills)
    made.report = report()
    return made


def query(
    *, pool: str = "short", tokens: int = 100, limits: tuple[int, ...] = (), empty: bool = False
) -> CapacityQuery:
    return CapacityQuery(pool=pool, tokens=tokens, long_limits=limits, is_backfill=empty)


def both(asked: CapacityQuery, state: ReplicaState, backpressure: GivenBackpressure | None = None) -> bool:
    """Return whether the replica fits, and check that `best` agrees when it is the only one."""
    by_adapter = ReplicasByAdapter()
    by_adapter.add(state)
    found = OpenReplicas(backpressure or GivenBackpressure(), {state.spec.replica_id: state}, by_adapter)
    found.update(state)
    fits = found.fits(state, asked, 7.0)
    assert (found.best(asked, 7.0) is state) == fits
    return fits


def test_a_closed_replica_fits_no_request() -> None:
    full = GivenBackpressure()
    full.has_room = False
    assert not both(query(), replica(), full)
    assert full.asked_at == 7.0
    gated, suspended = replica(), replica()
    gated.gated, suspended.suspended = True, True
    assert not both(query(), gated)
    assert not both(query(), suspended)


@pytest.mark.parametrize(("limits", "fits"), [((), True), ((3,), True), ((2,), False), ((3, 1), False)])
def test_long_prefills_in_flight_close_a_replica_to_more_of_them(limits: tuple[int, ...], fits: bool) -> None:
    assert both(query(limits=limits), replica(long_prefills=(2, 1))) is fits


@pytest.mark.parametrize(
    ("pool", "tokens", "limits", "room", "empty", "needs"),
    list(itertools.product(("short", "long"), (100, 101), ((), (1,)), *[(True, False)] * 3)),
)
def test_each_condition_must_be_met(
    pool: str, tokens: int, limits: tuple[int, ...], room: bool, empty: bool, needs: bool
) -> None:
    backpressure = GivenBackpressure()
    backpressure.has_room, backpressure.is_empty = room, empty
    state = replica(long_prefills=(1, 0))
    expected = pool == "short" and tokens == 100 and limits == () and room and (empty or not needs)
    assert both(query(pool=pool, tokens=tokens, limits=limits, empty=needs), state, backpressure) is expected


def test_several_changes_between_two_searches_cost_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    state = replica()
    found = OpenReplicas(GivenBackpressure(), {state.spec.replica_id: state}, ReplicasByAdapter())
    checks: list[float] = []

    def admits(_backpressure: GivenBackpressure, _state: ReplicaState, now: float) -> bool:
        checks.append(now)
        return True

    monkeypatch.setattr(GivenBackpressure, "admits", admits)
    for _change in range(5):
        found.update(state)
    assert checks == []
    assert found.best(query(), 7.0) is state
    # Once when it is inserted, and once more because its pace may have fallen since.
    assert checks == [7.0, 7.0]


def test_the_first_search_for_batch_work_sorts_the_replicas_by_it() -> None:
    backpressure = GivenBackpressure()
    crowded, free = replica(), replica()
    crowded.spec, free.spec, free.order = spec("crowded"), spec("free"), 1
    backpressure.is_empty = False
    found = OpenReplicas(backpressure, {"crowded": crowded, "free": free}, ReplicasByAdapter())
    for state in (crowded, free):
        found.update(state)
    assert found.best(query(), 7.0) is not None
    assert found.best(query(empty=True), 7.0) is None
    backpressure.is_empty = True
    found.update(free)
    assert found.best(query(empty=True), 7.0) is free


def test_a_search_that_excludes_a_replica_finds_what_has_changed_since_the_last_one() -> None:
    state = replica()
    found = OpenReplicas(GivenBackpressure(), {state.spec.replica_id: state}, ReplicasByAdapter())
    found.update(state)
    excludes_another = CapacityQuery(pool="short", tokens=100, avoided=frozenset({"b"}))
    assert found.best(excludes_another, 7.0) is state
