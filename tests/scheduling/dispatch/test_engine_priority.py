"""Priorities for engines: the numbers themselves, and where the scheduler takes and gives them back."""

import random
from dataclasses import replace
from typing import Any

import pytest

from serve_app.errors import Outcome
from serve_app.request import PriorityClass, Request
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.commands import Command, Dispatch
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.scheduling.dispatch.engine_priority import BAND, EnginePriorities, EnginePrioritySettings
from serve_app.scheduling.events import Cancelled, DispatchFailed, DispatchFailure, Finished, Resumed
from tests.builders import Simulation, request

INTERACTIVE, DEFAULT, BATCH = PriorityClass
ON = EnginePrioritySettings(enabled=True, target_waiting=100)


def told(commands: list[Command]) -> list[int | None]:
    return [command.engine_priority for command in commands if isinstance(command, Dispatch)]


def world() -> Simulation:
    made = Simulation(engine_priority=ON)
    made.join()
    return made


def test_a_tenants_first_pending_request_is_numbered_zero_and_the_next_from_there() -> None:
    pending = EnginePriorities(ON)
    heavy = [pending.on_dispatch(request(f"a{n}", tenant="a", priority=INTERACTIVE)) for n in range(4)]
    assert heavy == [0, 1, 2, 3]
    assert pending.on_dispatch(request("b0", tenant="b", priority=INTERACTIVE)) == 0


def test_a_request_that_has_left_makes_room_for_a_lower_number() -> None:
    pending = EnginePriorities(ON)
    sent = [request(f"a{n}") for n in range(3)]
    assert [pending.on_dispatch(one) for one in sent] == [BAND, BAND + 1, BAND + 2]
    pending.on_departure(sent[1])
    assert pending.on_dispatch(request("a3")) == BAND + 2
    for one in [sent[0], sent[2], request("a3")]:
        pending.on_departure(one)
    assert repr(pending) == "<EnginePriorities 0 of 0 tenants and classes>"


def test_the_last_of_a_class_comes_before_the_first_of_the_next() -> None:
    pending = EnginePriorities(ON)
    # As if a tenant had more in flight than any fleet holds.
    pending._pending["t1", INTERACTIVE] = pending._pending["t1", DEFAULT] = 5 * BAND
    last = [pending.on_dispatch(request(priority=priority)) for priority in PriorityClass]
    assert last == [BAND - 1, 2 * BAND - 1, 2 * BAND]


def test_a_tenants_batch_does_not_cost_it_its_turn_in_a_chat() -> None:
    pending = EnginePriorities(ON)
    for n in range(50):
        pending.on_dispatch(request(f"b{n}", priority=BATCH))
    assert pending.on_dispatch(request("chat", priority=INTERACTIVE)) == 0


def test_pending_requests_are_those_with_an_engine_whatever_happens_to_them() -> None:
    rng = random.Random(7)
    pending = EnginePriorities(ON)
    live: list[Request] = []
    for n in range(500):
        if live and rng.random() < 0.45:
            pending.on_departure(live.pop(rng.randrange(len(live))))
        else:
            one = request(f"r{n}", tenant=rng.choice("abc"), priority=rng.choice(list(PriorityClass)))
            same = sum((other.tenant, other.priority) == (one.tenant, one.priority) for other in live)
            assert pending.on_dispatch(one) == one.priority.rank * BAND + same
            live.append(one)


def test_without_the_mode_no_engine_is_told_a_priority() -> None:
    usual = Simulation()
    usual.join()
    assert told(usual.arrive(priority=BATCH)) == [None]


def test_a_dispatch_tells_the_class_and_the_tenants_pending_requests() -> None:
    live = world()
    first = [told(live.arrive(f"a{n}", tenant="a")) for n in range(3)]
    assert first == [[BAND], [BAND + 1], [BAND + 2]]
    assert told(live.arrive("b0", tenant="b")) == [BAND]
    assert told(live.arrive("a3", tenant="a", priority=INTERACTIVE)) == [0]
    assert told(live.arrive("a4", tenant="a", priority=BATCH)) == [2 * BAND]


@pytest.mark.parametrize(
    "end", [Finished("r1", Outcome.COMPLETED), Cancelled("r1"), Finished("r1", Outcome.FAILED)]
)
def test_an_ended_request_is_pending_no_more(end: Finished | Cancelled) -> None:
    live = world()
    live.arrive("r1")
    live.feed(end)
    assert told(live.arrive("r2")) == [BAND]


def test_a_request_that_comes_back_is_numbered_anew() -> None:
    live = world()
    live.join("s2")
    [where] = [command.replica_id for command in live.arrive("r1") if isinstance(command, Dispatch)]
    live.arrive("r2")
    again = live.feed(DispatchFailed("r1", where, DispatchFailure.LOST))
    # One other is pending; it itself is not.
    assert told(again) == [BAND + 1]


def test_a_new_scheduler_counts_what_runs_already() -> None:
    live = world()
    for n in range(2):
        live.feed(Resumed(request(f"r{n}"), "s1", started=True))
    assert told(live.arrive("r2")) == [BAND + 2]


def test_the_engines_queue_may_be_as_long_as_the_mode_says() -> None:
    tight = {"backpressure": BackpressureSettings(target_waiting=2, lag_factor=0.0)}
    sent = {}
    for mode in (
        EnginePrioritySettings(target_waiting=6),
        EnginePrioritySettings(enabled=True, target_waiting=6),
    ):
        live = Simulation(engine_priority=mode, **tight)
        live.join(max_num_seqs=1)
        sent[mode.enabled] = sum(len(told(live.arrive(f"r{n}"))) for n in range(20))
    assert sent == {False: 2, True: 6}


def test_batch_work_leaves_room_in_the_engines_queue_for_those_who_would_pass_it() -> None:
    live = Simulation(engine_priority=EnginePrioritySettings(enabled=True, target_waiting=8))
    live.join(max_num_seqs=1)
    for n in range(20):
        live.arrive(f"b{n}", priority=BATCH)
    assert 4 <= live.scheduler.ledger["s1"].in_flight <= 5
    assert told(live.arrive("chat", priority=INTERACTIVE)) == [0]


def test_the_modes_limits_take_the_place_of_those_of_backpressure() -> None:
    mode = EnginePrioritySettings(
        enabled=True, target_waiting=20, batch_share=0.25, max_prefill_backlog_s=9.0
    )
    usual = SchedulerSettings(model="m", engine_priority=replace(mode, enabled=False))
    assert usual.backpressure_in_force is usual.backpressure
    in_force = replace(usual, engine_priority=mode).backpressure_in_force
    assert in_force == replace(
        usual.backpressure, target_waiting=20, batch_target_waiting=5, max_prefill_backlog_s=9.0
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_waiting": 0}, r"engine_priority\.target_waiting must be at least 1, got 0"),
        ({"batch_share": 1.5}, r"engine_priority\.batch_share must be from 0 to 1, got 1\.5"),
        ({"max_prefill_backlog_s": 0.0}, r"max_prefill_backlog_s must be positive, got 0\.0"),
    ],
)
def test_limits_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnginePrioritySettings(**changes)
