"""Recognition of programs: which requests are turns, of which conversation and program."""

import re

import pytest

from serve_app.core.programs import program as recognition
from serve_app.core.programs.program import Conversation, ProgramTable, ProgramTurn
from serve_app.request import ProgramHint, TurnEnd
from tests.builders import request

ROOT = ProgramHint(session="root")


class Table(ProgramTable):
    """Feeds requests of which only the prompt and the stated ids matter."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._arrivals = 0

    def arrive(
        self, prompt: tuple[int, ...], hint: ProgramHint | None = None, *, tenant: str = "t1"
    ) -> ProgramTurn | None:
        """Submit a prompt with one message for each block."""
        self._arrivals += 1
        name, messages = f"r{self._arrivals}", len(prompt)
        return self.on_arrival(
            request(name, arrived_at=self.now, prefix=prompt, messages=messages, program=hint, tenant=tenant),
            self.now,
        )

    def end(self, turn: ProgramTurn, ending: TurnEnd = TurnEnd.TOOLS) -> Conversation:
        """End a turn as the scheduler does."""
        self.now += 1.0
        conversation = turn.conversation
        conversation.turns_open -= 1
        conversation.ended_at, conversation.ending = self.now, ending
        self.on_end(conversation)
        return conversation

    def turn(
        self, prompt: tuple[int, ...], hint: ProgramHint | None = ROOT, *, tenant: str = "t1"
    ) -> ProgramTurn:
        """Submit a prompt that must be a turn."""
        turn = self.arrive(prompt, hint, tenant=tenant)
        assert turn is not None
        return turn


# Requests in order, and the conversation and program that each is a turn of. A request is written as the ids
# that its client states (tenant/session@program<parent), the blocks of its prompt, and how its answer ends:
# with calls of tools unless stated. A conversation is named by its first request.
HISTORIES = {
    "requests with one session are one conversation": """
        root      -> r1 of root
        root      -> r1 of root""",
    "a session of another tenant is another program": """
        root 1    -> r1 of root
        t2/root 2 -> r2 of root""",
    "a prompt that starts with the last one extends it": """
        root 1 2     -> r1 of root
        root 1 2 3 4 -> r1 of root, extended""",
    "a second request during a turn is another conversation": """
        root open -> r1 of root
        root      -> r2 of root""",
    "a stated program has all its sessions": """
        a@p 1     -> r1 of p
        b@p 2     -> r2 of p""",
    "a prompt of another stated program is not continued": """
        a@p 1     -> r1 of p
        b@q 1 2   -> r2 of q""",
    # Such as one `prompt_cache_key` for all users of an application.
    "an id of very many conversations is not that of a program": """
        root 1    -> r1 of root
        root 2    -> r2 of root, launched by r1
        root 3    -> r3 of root, launched by r1
        root 4    -> r4 of r4
        root 5    -> r5 of r5
        root 5 50 -> r5 of r5, extended""",
    "the second turn without ids makes a conversation a program": """
        1 2       -> no turn
        1 2 3     -> r1 of r1, extended""",
    "a prompt continues the longest of the earlier ones": """
        root 1 2    -> r1 of root
        other 1 2 3 -> r2 of other
        1 2 3 4     -> r2 of other, extended
        1 2 9       -> r1 of root, extended""",
    "a prompt that is repeated or has other blocks is no turn": """
        1 2       -> no turn
        1 2       -> no turn
        1 3 4     -> no turn""",
    "a conversation with an open turn is not continued": """
        1 2        -> no turn
        1 2 3 open -> r1 of r1, extended
        1 2 3 4    -> no turn""",
    "a sub-agent with a stated parent joins its program": """
        root 1            -> r1 of root
        child<root 2 open -> r2 of root, launched by r1
        root 1 9          -> r1 of root, extended""",
    "a sub-agent may arrive before its parent": """
        child<root 2 -> r1 of root
        root 1       -> r2 of root""",
    "a sub-agent with the same session id has another prompt": """
        root 1    -> r1 of root
        root 7    -> r2 of root, launched by r1
        root 7 8  -> r2 of root, launched by r1, extended
        root 1 2  -> r1 of root, extended""",
    "a sub-agent without ids belongs to the only program that awaits tools": """
        1         -> no turn
        1 2       -> r1 of r1, extended
        7         -> no turn
        7 8       -> r3 of r1, launched by r1, extended""",
    "a request without ids is a program of its own if several await tools": """
        root 1    -> r1 of root
        other 2   -> r2 of other
        7         -> no turn
        7 8       -> r3 of r3, extended""",
    "a program of another tenant launches no sub-agent": """
        root 1    -> r1 of root
        t2/7      -> no turn
        t2/7 8    -> r2 of r2, extended""",
    "a program whose answer is complete launches no sub-agent": """
        root 1 done -> r1 of root
        7           -> no turn
        7 8         -> r2 of r2, extended""",
    "a program whose answer ends otherwise launches no sub-agent": """
        root 1 other -> r1 of root
        7            -> no turn
        7 8          -> r2 of r2, extended""",
    "a program that continues no longer awaits tools": """
        root 1        -> r1 of root
        root 1 2 open -> r1 of root, extended
        7             -> no turn
        7 8           -> r3 of r3, extended""",
}
REQUEST = re.compile(r"(?:(t2)/)?([a-z]+)?(?:@(\w+))?(?:<(\w+))? ?([\d ]*)(\w*)")


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_requests_are_turns(history: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_MOST_OF_A_PROGRAM", 3)
    table, programs = Table(), set[tuple[str, str]]()
    for line in history.split("\n")[1:]:
        written, expected = map(str.strip, line.split("->"))
        parsed = REQUEST.fullmatch(written)
        assert parsed is not None
        tenant, session, program, parent, blocks, ending = parsed.groups()
        hint = ProgramHint(session=session, program=program, parent=parent) if session else None
        turn = table.arrive(tuple(map(int, blocks.split())), hint, tenant=tenant or "t1")
        found = "no turn"
        if turn is not None:
            conversation = turn.conversation
            programs.add((tenant or "t1", turn.program.key[1]))
            found = f"{conversation.first_request} of {turn.program.key[1]}"
            if conversation.parent is not None:
                found += f", launched by {conversation.parent.first_request}"
            if turn.extends:
                found += ", extended"
            if ending != "open":
                table.end(turn, TurnEnd(ending or "tools"))
        assert found == expected
        assert {each.key for each in table.programs()} == programs


def test_a_program_knows_its_start_and_whether_its_id_is_stated() -> None:
    table = Table()
    table.arrive((1, 2))
    table.now = 3.0
    recognised, stated = table.turn((1, 2, 3), None).program, table.turn((4,)).program
    assert (recognised.stated, recognised.started_at) == (False, 0.0)
    assert (stated.stated, stated.started_at) == (True, 3.0)


def test_the_gap_is_the_time_since_the_last_turn_ended() -> None:
    table = Table()
    gaps = []
    for seconds in (0.0, 0.0, 7.0):
        table.now += seconds
        turn = table.turn(())
        gaps.append(turn.gap_s)
        table.end(turn)
    assert gaps == [None, 0.0, 7.0]


@pytest.mark.parametrize(("prompt", "messages"), [((), 2), ((1,), 0)])
def test_a_request_without_ids_that_cannot_be_continued_is_not_remembered(
    prompt: tuple[int, ...], messages: int
) -> None:
    table = Table()
    assert table.on_arrival(request(prefix=prompt, messages=messages), 0.0) is None
    assert len(table) == 0


# Memory


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Return a table that remembers three conversations."""
    monkeypatch.setattr(recognition, "_MOST_CONVERSATIONS", 3)
    monkeypatch.setattr(recognition, "_FORGET_AFTER_S", 60.0)
    return Table()


def complete(table: Table, *numbers: int, tenant: str = "t1") -> list[Conversation]:
    """Submit and end turns, each of its own prompt and session."""
    return [
        table.end(table.turn((number,), ProgramHint(session=str(number)), tenant=tenant))
        for number in numbers
    ]


def test_forgets_what_it_does_not_need(table: Table) -> None:
    completed = complete(table, *range(10))
    assert list(table.forget(table.now)) == completed[:7]
    assert repr(table) == "<ProgramTable 3 programs, 3 conversations>"
    # All that identified a forgotten conversation is forgotten, too.
    again = table.turn((0, 1), ProgramHint(session="0"))
    assert (again.gap_s, again.extends) == (None, False)
    assert table.turn((), ProgramHint(session="1")).gap_s is None


def test_the_conversation_that_was_used_least_recently_is_forgotten_first(table: Table) -> None:
    first, second, *_ = complete(table, 1, 2, 3)
    assert table.end(table.turn((1, 1), ProgramHint(session="1"))) is first
    complete(table, 4)
    assert list(table.forget(table.now)) == [second]


def test_a_tenant_with_many_conversations_displaces_only_its_own(table: Table) -> None:
    (quiet,) = complete(table, 1, tenant="quiet")
    for number in range(2, 22):
        complete(table, number, tenant="busy")
        assert quiet not in list(table.forget(table.now))
    assert len(table) == 3
    assert table.turn((1, 1), ProgramHint(session="1"), tenant="quiet").conversation is quiet


def test_a_conversation_that_has_not_returned_for_long_is_forgotten(table: Table) -> None:
    table.arrive((9,))
    conversations = complete(table, 1)
    table.now += 60.0
    assert [each.first_request for each in table.forget(table.now)] == ["r1"]
    table.now += 0.1
    assert list(table.forget(table.now)) == conversations
    assert (len(table), table.programs()) == (0, [])
    assert list(table.forget(table.now)) == []


def test_a_turn_that_takes_long_is_remembered_and_does_not_keep_the_others(table: Table) -> None:
    long = table.turn((1,))
    others = complete(table, 2, 3, 4, 5)
    assert list(table.forget(table.now)) == others[:2]
    assert len(table) == 3
    assert table.end(long).program in table.programs()


def test_more_open_turns_than_may_be_remembered_are_all_remembered(table: Table) -> None:
    for number in range(5):
        table.turn((number,), ProgramHint(session=str(number)))
    assert list(table.forget(table.now)) == []
    assert len(table) == 5
