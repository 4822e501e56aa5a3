"""Recognition of programs: which requests are turns, of which conversation and program."""

import pytest

from serve_app.core.programs import program as recognition
from serve_app.core.programs.program import Conversation, ProgramTable, ProgramTurn
from serve_app.request import ProgramHint, Request, TurnEnd
from tests.builders import request

ROOT = ProgramHint(session="root")


class Table(ProgramTable):
    """Feeds requests of which only the prompt and the stated ids matter."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._arrivals = 0

    def arrive(
        self, prompt: tuple[int, ...] = (), hint: ProgramHint | None = None, *, tenant: str = "t1"
    ) -> ProgramTurn | None:
        """Submit a prompt with one message for each block."""
        self._arrivals += 1
        return self.on_arrival(self.request(prompt, hint, tenant), self.now)

    def turn(
        self, prompt: tuple[int, ...] = (), hint: ProgramHint | None = None, *, tenant: str = "t1"
    ) -> ProgramTurn:
        """Submit a prompt that must be a turn."""
        turn = self.arrive(prompt, hint, tenant=tenant)
        assert turn is not None
        return turn

    def end(
        self, turn: ProgramTurn, ending: TurnEnd = TurnEnd.TOOLS, *, after_s: float = 1.0
    ) -> Conversation:
        """End a turn as the scheduler does."""
        self.now += 1.0
        conversation = turn.conversation
        conversation.turns_open -= 1
        conversation.ended_at, conversation.ending = self.now, ending
        self.on_end(conversation)
        return conversation

    def complete(
        self, prompt: tuple[int, ...] = (), hint: ProgramHint | None = None, *, tenant: str = "t1"
    ) -> Conversation:
        """Submit a turn and end it with calls of tools."""
        return self.end(self.turn(prompt, hint, tenant=tenant))

    def recognised(self, prompt: tuple[int, ...], *, tenant: str = "t1") -> Conversation:
        """Submit the first two turns of a conversation without ids, and end them."""
        assert self.arrive(prompt[:-1], tenant=tenant) is None
        return self.complete(prompt, tenant=tenant)

    def request(self, prompt: tuple[int, ...], hint: ProgramHint | None, tenant: str) -> Request:
        name = f"r{self._arrivals}"
        return request(
            name, arrived_at=self.now, prefix=prompt, messages=len(prompt), program=hint, tenant=tenant
        )


# Stated ids


def test_requests_with_one_session_are_one_conversation() -> None:
    table = Table()
    first = table.complete((), ROOT)
    assert first.program is not None
    assert (first.program.key, first.program.stated) == (("t1", "root"), True)
    again = table.turn((), ROOT)
    assert again.conversation is first
    assert not again.extends


def test_a_stated_session_of_another_tenant_is_another_program() -> None:
    table = Table()
    first = table.complete((1,), ROOT)
    other = table.turn((2,), ROOT, tenant="t2")
    assert other.conversation is not first
    assert other.program is not first.program


def test_a_prompt_that_starts_with_the_last_one_extends_it() -> None:
    table = Table()
    first = table.complete((1, 2), ROOT)
    turn = table.turn((1, 2, 3, 4), ROOT)
    assert turn.conversation is first
    assert turn.extends


def test_the_gap_is_the_time_since_the_last_turn_ended() -> None:
    table = Table()
    turn = table.turn((1,), ROOT)
    assert turn.gap_s is None
    table.end(turn)
    table.now += 7.0
    assert table.turn((1, 2), ROOT).gap_s == 7.0


def test_a_second_request_during_a_turn_is_another_conversation() -> None:
    table = Table()
    first = table.turn((), ROOT)
    second = table.turn((), ROOT)
    assert second.conversation is not first.conversation
    assert second.program is first.program
    assert second.gap_s is None


def test_a_stated_program_holds_all_its_sessions() -> None:
    table = Table()
    one = table.complete((1,), ProgramHint(session="a", program="p"))
    other = table.complete((2,), ProgramHint(session="b", program="p"))
    assert one is not other
    assert one.program is other.program
    assert [program.key for program in table.programs()] == [("t1", "p")]


def test_a_prompt_of_another_stated_program_is_not_continued() -> None:
    table = Table()
    one = table.complete((1,), ProgramHint(session="a", program="p"))
    turn = table.turn((1, 2), ProgramHint(session="b", program="q"))
    assert turn.conversation is not one
    assert not turn.extends


def test_an_id_of_very_many_conversations_is_not_that_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one `prompt_cache_key` for all users of an application."""
    monkeypatch.setattr(recognition, "_MOST_OF_A_PROGRAM", 3)
    table = Table()
    found = [table.complete((number,), ROOT) for number in range(5)]
    assert len({id(each.program) for each in found[:3]}) == 1
    assert len({id(each.program) for each in found[2:]}) == 3
    assert found[4].parent is None
    # They are continued all the same.
    assert table.complete((4, 40), ROOT) is found[4]
    assert len(table.programs()) == 3


# Prompts without ids


def test_a_first_request_without_ids_is_no_turn() -> None:
    table = Table()
    assert table.arrive((1, 2)) is None
    assert table.programs() == []


def test_a_request_without_ids_and_hashes_is_no_turn_and_is_not_remembered() -> None:
    table = Table()
    assert table.arrive(()) is None
    assert len(table) == 0


def test_a_prompt_that_is_no_chat_is_not_remembered() -> None:
    table = Table()
    completion = request(prefix=(1,), messages=0)
    assert table.on_arrival(completion, 0.0) is None
    assert len(table) == 0


def test_the_second_turn_makes_a_conversation_a_program() -> None:
    table = Table()
    table.arrive((1, 2))
    table.now = 3.0
    turn = table.turn((1, 2, 3))
    assert turn.extends
    assert turn.gap_s is None
    assert (turn.program.key, turn.program.stated, turn.program.started_at) == (("t1", "r1"), False, 0.0)


def test_a_prompt_continues_the_longest_of_the_earlier_ones() -> None:
    table = Table()
    short = table.complete((1, 2), ROOT)
    long = table.complete((1, 2, 3), ProgramHint(session="other"))
    assert table.complete((1, 2, 3, 4)) is long
    assert table.complete((1, 2, 9)) is short


def test_a_repeated_prompt_is_no_turn() -> None:
    table = Table()
    table.arrive((1, 2))
    assert table.arrive((1, 2)) is None


def test_a_prompt_with_other_blocks_is_no_turn() -> None:
    table = Table()
    table.arrive((1, 2))
    assert table.arrive((1, 3, 4)) is None


def test_a_conversation_with_an_open_turn_is_not_continued() -> None:
    table = Table()
    table.arrive((1, 2))
    table.turn((1, 2, 3))
    assert table.arrive((1, 2, 3, 4)) is None


# Sub-agents


def test_a_sub_agent_with_a_stated_parent_joins_its_program() -> None:
    table = Table()
    root = table.complete((1,), ROOT)
    child = table.turn((2,), ProgramHint(session="child", parent="root"))
    assert child.conversation.parent is root
    assert child.program is root.program
    assert table.complete((1, 9), ROOT) is root


def test_a_sub_agent_may_arrive_before_its_parent() -> None:
    table = Table()
    child = table.complete((2,), ProgramHint(session="child", parent="root"))
    assert child.parent is None
    root = table.turn((1,), ROOT)
    assert root.conversation is not child
    assert root.program is child.program


def test_a_sub_agent_with_the_same_session_id_has_another_prompt() -> None:
    table = Table()
    root = table.complete((1,), ROOT)
    child = table.complete((7,), ROOT)
    assert child is not root
    assert child.parent is root
    assert child.program is root.program
    assert table.complete((7, 8), ROOT) is child
    assert table.complete((1, 2), ROOT) is root


def test_a_sub_agent_without_ids_belongs_to_the_only_program_that_awaits_tools() -> None:
    table = Table()
    root = table.recognised((1, 2))
    child = table.recognised((7, 8))
    assert child.parent is root
    assert child.program is root.program
    assert [program.key for program in table.programs()] == [("t1", "r1")]


def test_a_request_without_ids_is_a_program_of_its_own_if_several_await_tools() -> None:
    table = Table()
    one, other = table.complete((1,), ROOT), table.complete((2,), ProgramHint(session="other"))
    third = table.recognised((7, 8))
    assert third.parent is None
    assert third.program not in (one.program, other.program)


def test_a_program_of_another_tenant_launches_no_sub_agent() -> None:
    table = Table()
    root = table.complete((1,), ROOT)
    other = table.recognised((7, 8), tenant="t2")
    assert other.program is not root.program


@pytest.mark.parametrize("ending", [TurnEnd.DONE, TurnEnd.OTHER])
def test_a_program_whose_answer_called_no_tools_launches_no_sub_agent(ending: TurnEnd) -> None:
    table = Table()
    root = table.end(table.turn((1,), ROOT), ending)
    assert table.recognised((7, 8)).program is not root.program


def test_a_program_that_continues_no_longer_awaits_tools() -> None:
    table = Table()
    root = table.complete((1,), ROOT)
    table.turn((1, 2), ROOT)
    assert table.recognised((7, 8)).program is not root.program


# Memory


def test_forgets_what_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_MOST_CONVERSATIONS", 3)
    table = Table()
    kept = []
    for number in range(10):
        kept.append(table.complete((number,), ProgramHint(session=str(number))))
        assert list(table.forget(table.now)) == kept[:-3]
        del kept[:-3]
        assert len(table) <= 3
    assert len(table.programs()) == 3
    assert repr(table) == "<ProgramTable 3 programs, 3 conversations>"
    # All that identified a forgotten conversation is forgotten, too.
    assert table.turn((0, 1), ProgramHint(session="0")).gap_s is None


def test_the_conversation_that_was_used_least_recently_is_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recognition, "_MOST_CONVERSATIONS", 2)
    table = Table()
    first, second = table.complete((1,), ProgramHint(session="a")), table.complete((2,), ROOT)
    table.complete((1, 1), ProgramHint(session="a"))
    table.complete((3,), ProgramHint(session="c"))
    assert list(table.forget(table.now)) == [second]
    assert first.program in table.programs()


def test_a_tenant_with_many_conversations_displaces_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_MOST_CONVERSATIONS", 4)
    table = Table()
    quiet = table.complete((1,), ROOT, tenant="quiet")
    flood = []
    for number in range(2, 22):
        flood.append(table.complete((number,), ProgramHint(session=str(number)), tenant="busy"))
        assert quiet not in list(table.forget(table.now))
    assert len(table) == 4
    again = table.turn((1, 1), ROOT, tenant="quiet")
    assert (again.conversation, again.extends) == (quiet, True)


def test_a_conversation_that_has_not_returned_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_FORGET_AFTER_S", 60.0)
    table = Table()
    table.arrive((9,))
    conversation = table.complete((1,), ROOT)
    table.now += 60.0
    assert [each.first_request for each in table.forget(table.now)] == ["r1"]
    table.now += 0.1
    assert list(table.forget(table.now)) == [conversation]
    assert (len(table), table.programs()) == (0, [])
    assert list(table.forget(table.now)) == []


def test_a_turn_that_takes_long_is_remembered_and_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recognition, "_MOST_CONVERSATIONS", 2)
    table = Table()
    long = table.turn((1,), ROOT)
    others = [table.complete((number,), ProgramHint(session=str(number))) for number in (2, 3, 4)]
    assert list(table.forget(table.now)) == others[:2]
    assert len(table) == 2
    assert table.end(long).program in table.programs()


def test_more_open_turns_than_may_be_remembered_are_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_MOST_CONVERSATIONS", 2)
    table = Table()
    for number in range(5):
        table.turn((number,), ProgramHint(session=str(number)))
    assert list(table.forget(table.now)) == []
    assert len(table) == 5
