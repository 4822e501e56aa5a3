"""Order among the parked turns."""

import math

from serve_app.core.policies import POLICIES, make_policy
from serve_app.core.policies.protocol import PolicyInputs
from serve_app.core.programs.order import ParkedTurns
from serve_app.core.programs.program import Conversation, Program, ProgramTurn
from serve_app.core.programs.settings import ProgramOrder
from serve_app.core.queueing.fairness import FairnessMode, FairnessSettings
from serve_app.core.queueing.request_queue import RequestQueue
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.settings import SchedulerSettings
from serve_app.request import PriorityClass
from tests.builders import scheduled_request


def program(name: str, started_at: float = 0.0, service: float = 0.0) -> Program:
    return Program(("t1", name), started_at, stated=True, service=service)


def agent(of: Program, parent: Conversation | None = None) -> Conversation:
    """Return a conversation of a program with an open turn."""
    found = Conversation("t1", f"c{len(of.conversations)}", 0.0, parent, of, turns_open=1)
    of.conversations.add(found)
    return found


def turn(conversation: Conversation, sequence: int, **fields: object) -> ScheduledRequest:
    scheduled = scheduled_request(f"r{sequence}", sequence=sequence, **fields)  # type: ignore[arg-type]
    scheduled.turn = ProgramTurn(conversation, extends=True)
    return scheduled


def turns(order: ProgramOrder = ProgramOrder.FCFS, *, joins: bool = True) -> ParkedTurns:
    return ParkedTurns(order, joins=joins)


def queue(mode: FairnessMode = FairnessMode.TOKENS) -> RequestQueue:
    inputs = PolicyInputs(prefill_costs=PrefillCosts(), ewsjf=SchedulerSettings(model="m").ewsjf)
    return RequestQueue(make_policy("fcfs", inputs, POLICIES), FairnessSettings(mode=mode))


def order_of(parked: ParkedTurns, waiting: RequestQueue | None = None) -> list[str]:
    return [each.request.request_id for each in parked.candidates(queue() if waiting is None else waiting)]


def test_the_program_that_started_first_is_first() -> None:
    parked = turns()
    for sequence, started_at in enumerate((3.0, 1.0, 2.0)):
        parked.add(turn(agent(program(str(sequence), started_at)), sequence))
    assert order_of(parked) == ["r1", "r2", "r0"]


def test_the_program_with_the_least_service_is_first_if_so_configured() -> None:
    parked = turns(ProgramOrder.LEAST_SERVICE)
    for sequence, service in enumerate((300.0, 100.0, 200.0)):
        parked.add(turn(agent(program(str(sequence), float(sequence), service)), sequence))
    assert order_of(parked) == ["r1", "r2", "r0"]


def test_equal_programs_are_in_the_order_of_arrival() -> None:
    parked = turns()
    for sequence in (2, 1, 3):
        parked.add(turn(agent(program(str(sequence))), sequence))
    assert order_of(parked) == ["r1", "r2", "r3"]


def test_the_last_open_agent_of_a_program_is_first() -> None:
    early, late = program("early"), program("late", started_at=5.0)
    parked = turns()
    parked.add(turn(agent(early), 1))
    parked.add(turn(agent(late, parent=agent(late)), 2))
    assert order_of(parked) == ["r2", "r1"]


def test_an_agent_beside_another_open_one_is_not_preferred() -> None:
    early, late = program("early"), program("late", started_at=5.0)
    root = agent(late)
    last, other = agent(late, parent=root), agent(late, parent=root)
    parked = turns()
    parked.add(turn(agent(early), 1))
    parked.add(turn(last, 2))
    assert order_of(parked) == ["r1", "r2"]
    other.turns_open = 0
    parked.refresh(late)
    assert order_of(parked) == ["r2", "r1"]


def test_joins_may_be_disabled() -> None:
    early, late = program("early"), program("late", started_at=5.0)
    parked = turns(joins=False)
    parked.add(turn(agent(early), 1))
    parked.add(turn(agent(late, parent=agent(late)), 2))
    assert order_of(parked) == ["r1", "r2"]


def test_a_turn_is_a_candidate_once_even_if_its_place_changed_and_changed_back() -> None:
    waiting = program("p")
    root = agent(waiting)
    last, other = agent(waiting, parent=root), agent(waiting, parent=root)
    parked = turns()
    parked.add(turn(last, 1))
    for open_turns in (0, 1):
        other.turns_open = open_turns
        parked.refresh(waiting)
    assert order_of(parked) == ["r1"]


def test_a_turn_that_was_removed_and_added_again_is_a_candidate_once() -> None:
    parked, scheduled = turns(), turn(agent(program("p")), 1)
    parked.add(scheduled)
    assert parked.remove(scheduled)
    assert not parked.remove(scheduled)
    assert order_of(parked) == []
    parked.add(scheduled)
    parked.remove(scheduled)
    parked.add(scheduled)
    assert order_of(parked) == ["r1"]


def test_higher_classes_are_first() -> None:
    parked = turns()
    for sequence, priority in enumerate(reversed(PriorityClass)):
        parked.add(turn(agent(program(str(sequence))), sequence, priority=priority))
    assert order_of(parked) == ["r2", "r1", "r0"]


def test_tenants_are_in_the_order_of_their_shares() -> None:
    parked, waiting = turns(), queue()
    for sequence, tenant in enumerate(("much", "little", "much")):
        scheduled = turn(agent(program(str(sequence), float(sequence))), sequence, tenant=tenant)
        waiting.add(scheduled)
        parked.add(scheduled)
    shares = waiting.shares[PriorityClass.DEFAULT]
    shares.charge("much", 1_000.0)
    shares.charge("little", 10.0)
    assert order_of(parked, waiting) == ["r1", "r0", "r2"]


def test_a_tenant_whose_turns_were_removed_may_be_forgotten_by_the_shares() -> None:
    parked, waiting = turns(), queue()
    gone = turn(agent(program("gone")), 0, tenant="gone")
    parked.add(gone)
    parked.remove(gone)
    for sequence, tenant in enumerate(("a", "b"), start=1):
        scheduled = turn(agent(program(tenant)), sequence, tenant=tenant)
        waiting.add(scheduled)
        parked.add(scheduled)
    assert order_of(parked, waiting) == ["r1", "r2"]


def test_few_turns_of_each_tenant_are_tried() -> None:
    parked = turns()
    for sequence in range(20):
        parked.add(turn(agent(program(str(sequence), float(sequence))), sequence))
    expected = [f"r{number}" for number in range(8)]
    assert order_of(parked) == expected
    assert order_of(parked) == expected


def test_without_fairness_all_tenants_have_one_order() -> None:
    parked = turns()
    for sequence, (tenant, started_at) in enumerate((("a", 2.0), ("b", 1.0), ("a", 0.0))):
        parked.add(turn(agent(program(str(sequence), started_at)), sequence, tenant=tenant))
    assert order_of(parked, queue(FairnessMode.OFF)) == ["r2", "r1", "r0"]


def test_a_candidate_may_be_removed_before_the_next_is_taken() -> None:
    parked = turns()
    for sequence in range(3):
        parked.add(turn(agent(program(str(sequence), float(sequence))), sequence))
    for each in parked.candidates(queue()):
        parked.remove(each)
    assert len(parked) == 0
    assert list(parked) == []
    assert repr(parked) == "<ParkedTurns 0 of 0 programs>"


def test_the_fewest_tokens_are_those_of_the_turns_that_are_left() -> None:
    parked = turns()
    assert parked.fewest_tokens == math.inf
    waiting = [turn(agent(program("p")), n, prompt_tokens=tokens) for n, tokens in enumerate((300, 100, 100))]
    for each in waiting:
        parked.add(each)
    fewest = []
    for each in reversed(waiting):
        fewest.append(parked.fewest_tokens)
        parked.remove(each)
    assert fewest == [waiting[n].estimate.expected_tokens for n in (1, 1, 0)]


def test_the_turns_of_a_program_are_counted() -> None:
    of = program("p")
    parked = turns()
    first = turn(agent(of), 1)
    parked.add(first)
    parked.add(turn(agent(of), 2))
    assert parked.of_program(of) == 2
    parked.remove(first)
    assert parked.of_program(of) == 1
    assert parked.of_program(program("other")) == 0
