"""The invariants of programs, and all others of the scheduler, in random histories with programs."""

import math
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import consumes, invariant, multiple, rule

from serve_app.core import events as ev
from serve_app.core.programs.program import Conversation
from serve_app.core.request import ScheduledRequest
from serve_app.errors import Outcome
from serve_app.request import PriorityClass, ProgramHint, TurnEnd, Usage
from tests.builders import request
from tests.properties.recording_machine import BATCH, DEFAULT, INTERACTIVE, steps_of_time
from tests.properties.test_scheduler_invariants import SchedulerMachine


@dataclass(frozen=True)
class Turn:
    """A request of one of the threads of a client, which are told apart by their prompts."""

    thread: str
    stated: ProgramHint | None
    whose: tuple[str, PriorityClass]
    prompt_tokens: int
    extends: bool


turns = st.builds(
    Turn,
    thread=st.sampled_from(["x", "y", "z"]),
    stated=st.sampled_from(
        [
            None,
            ProgramHint(session="x"),
            ProgramHint(session="y", parent="x"),
            ProgramHint(session="z", program="p"),
        ]
    ),
    whose=st.sampled_from([("a", DEFAULT), ("a", DEFAULT), ("b", INTERACTIVE), ("c", BATCH)]),
    prompt_tokens=st.sampled_from([40, 300, 480, 900, 3_000]),
    extends=st.booleans(),
)
contexts = st.sampled_from([100, 900, 3_000])
endings = st.sampled_from([TurnEnd.TOOLS, TurnEnd.DONE, None])


class ProgramsMachine(SchedulerMachine):
    """Adds turns of programs, with and without stated ids, to the requests of `SchedulerMachine`."""

    def __init__(self) -> None:
        super().__init__()
        # The last prompt of each thread: hashes of its blocks and number of messages.
        self.prompts: dict[str, tuple[tuple[int, ...], int]] = {}

    @rule(
        target=SchedulerMachine.requests,
        turns=st.lists(turns, min_size=1, max_size=3),
        timeout_s=st.sampled_from([0.3, 5.0, math.inf]),
        no_wait=st.sampled_from([False, False, True]),
        seconds=steps_of_time,
    )
    def take_turns(self, turns: list[Turn], timeout_s: float, no_wait: bool, seconds: float):  # type: ignore[no-untyped-def]
        self.pass_time(seconds)
        return multiple(*(self.submit(turn, timeout_s, no_wait=no_wait) for turn in turns))

    @rule(turns=st.lists(turns, min_size=1, max_size=3), answer_tokens=contexts, ending=endings)
    def complete_turns(self, turns: list[Turn], answer_tokens: int, ending: TurnEnd | None) -> None:
        for turn in turns:
            self.finish_turn(self.submit(turn, 0.3, no_wait=False), answer_tokens, ending)
            self.pass_time(0.1)

    @rule(
        request_id=consumes(SchedulerMachine.requests),
        answer_tokens=contexts,
        ending=endings,
        seconds=steps_of_time,
    )
    def answer(self, request_id: str, answer_tokens: int, ending: TurnEnd | None, seconds: float) -> None:
        self.pass_time(seconds)
        self.finish_turn(request_id, answer_tokens, ending)

    def submit(self, turn: Turn, timeout_s: float, *, no_wait: bool) -> str:
        request_id = self.new_request("g1", timeout_s)
        self.waiting.add(request_id)
        if no_wait:
            self.no_wait.add(request_id)
        tenant, priority = turn.whose
        thread = f"{tenant} {turn.thread}"
        prefix, messages = self.prompts.get(thread, ((), 0)) if turn.extends else ((), 0)
        prefix, messages = (*prefix, len(self.submitted)), messages + 2
        self.prompts[thread] = prefix, messages
        arrived = request(
            request_id,
            prompt_tokens=turn.prompt_tokens,
            max_output_tokens=50,
            arrived_at=self.now,
            expires_at=self.now + timeout_s,
            no_wait=no_wait,
            tenant=tenant,
            priority=priority,
            prefix=prefix,
            messages=messages,
            program=turn.stated,
        )
        self.feed(ev.Arrived(arrived))
        return request_id

    def finish_turn(self, request_id: str, answer_tokens: int, ending: TurnEnd | None) -> None:
        if request_id in self.running:
            usage = Usage(prompt_tokens=answer_tokens, output_tokens=20, ending=ending)
            self.feed(ev.Finished(request_id, Outcome.COMPLETED, usage))

    def open_turns(self) -> list[ScheduledRequest]:
        found = [self.find(request_id) for request_id in (*self.waiting, *self.running)]
        return [scheduled for scheduled in found if scheduled.turn is not None]

    @invariant()
    def a_context_is_on_one_replica(self) -> None:
        programs = self.scheduler.programs
        places: dict[Conversation, str] = {}
        for state in self.scheduler.ledger:
            contexts = programs.residency.known(state.spec.replica_id)
            if contexts is None:
                continue
            here = [*contexts.active, *(conversation for conversation, _ in contexts.idle())]
            assert len(here) == len(contexts)
            for conversation in here:
                assert conversation not in places
                places[conversation] = state.spec.replica_id
        known = {
            conversation: conversation.replica_id
            for program in programs.table.programs()
            for conversation in program.conversations
            if conversation.replica_id is not None
        }
        assert places == known

    @invariant()
    def counts_as_active_exactly_the_conversations_with_an_open_turn(self) -> None:
        open_conversations = {id(turn.turn.conversation) for turn in self.open_turns() if turn.turn}
        for state in self.scheduler.ledger:
            contexts = self.scheduler.programs.residency.known(state.spec.replica_id)
            if contexts is not None:
                assert {id(each) for each in contexts.active} <= open_conversations

    @invariant()
    def what_is_admitted_is_dispatched_or_returned(self) -> None:
        admitted = dict.fromkeys((state.spec.replica_id for state in self.scheduler.ledger), 0)
        for scheduled in self.open_turns():
            turn = scheduled.turn
            assert turn is not None
            if scheduled.resident_on in self.replicas and turn.admitted_to is not None:
                assert scheduled.queued
                admitted[scheduled.resident_on] += scheduled.estimate.expected_tokens
        for replica_id, tokens in admitted.items():
            contexts = self.scheduler.programs.residency.known(replica_id)
            assert (0 if contexts is None else contexts.admitted) == tokens

    @invariant()
    def counts_the_open_turns_of_each_conversation(self) -> None:
        turns = self.open_turns()
        for program in self.scheduler.programs.table.programs():
            for conversation in program.conversations:
                own = [each for each in turns if each.turn and each.turn.conversation is conversation]
                assert conversation.turns_open == len(own) <= 1
                running = sum(each.request.request_id in self.running for each in own)
                assert conversation.running == running

    @invariant()
    def leaves_no_turn_parked_beside_an_unused_replica(self) -> None:
        programs = self.scheduler.programs
        for scheduled in programs.parked:
            destination = scheduled.request.destination
            for state in self.scheduler.ledger:
                spec = state.spec
                admits = spec.pool in scheduled.pools and destination.admits(spec.replica_id, spec.adapters)
                assert not (admits and state.is_usable and programs.residency.is_unused(state, self.now))

    @invariant()
    def parks_only_queued_turns_that_are_bound_to_nothing(self) -> None:
        queue = self.scheduler.queue
        parked = {scheduled for scheduled in queue if scheduled.parked}
        assert set(self.scheduler.programs.parked) == parked
        assert set(queue.parked.values()) == {each for each in parked if not each.attempts.backoff_until}
        assert all(each.turn is not None and each.resident_on is None for each in parked)


TestProgramsMachine = ProgramsMachine.TestCase
TestProgramsMachine.settings = settings(
    max_examples=100, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow]
)
