"""Agent programs: their state, and how requests are recognised as their turns.

- `Program`: a tree of conversations: that of an agent and those of its sub-agents.
- `Conversation`: a sequence of turns, each of which is one request whose prompt usually extends the previous
  one.
- `ProgramTable`: finds the conversation that a request continues, and its program.

`ProgramTable`. Stated ids come first. Requests with the same session or program id, of the same tenant,
belong to one program. Within it, and for clients that state no id, prompts decide: a request continues the
conversation whose last prompt its own prompt starts with, and has more messages. The hashes of prompts are
scoped to a tenant, so no request continues the conversation of another tenant.

A conversation without a stated id counts as a program from its second turn on. Its first request is like any
other, so traffic without conversations is not affected.

A sub-agent belongs to the conversation whose session its client states as parent. Otherwise it belongs to
the program with its session id. Without any id, it belongs to the only program of its tenant whose last
answer has called tools and is waiting for them; if there are several, it becomes a program of its own.

Wrong guesses. A request taken for a turn of another conversation is bound to the replica of that context for
at most the time of computing the prompt, and it is charged to the tenant that sent it. A turn that is not
recognised is scheduled as any other request.

Invariants, named as in the tests:
- `forgets_what_it_does_not_need`: at most `_MOST_CONVERSATIONS` conversations are remembered. Above that, the
  tenant with the most of them loses its least recently used one, so that no tenant displaces those of others.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from serve_app.request import ProgramHint, Request, TurnEnd, Usage

ProgramKey = tuple[str, str]
"""Tenant, and the id that the client stated or the id of the program's first request."""


@dataclass(slots=True)
class ProgramTokens:
    """Tokens of the turns of a program, as engines reported them.

    Attributes:
        cached: prompt tokens found in the KV cache; 0 as well if the engine does not report them.
        again: prompt tokens that an earlier turn of the conversation had, and that were not cached.
    """

    prompt: int = 0
    cached: int = 0
    again: int = 0
    output: int = 0

    def add(self, usage: Usage, known: int) -> None:
        """Add a turn whose first `known` tokens were in the previous one."""
        self.prompt += usage.prompt_tokens
        self.cached += usage.cached_tokens
        self.again += max(0, min(known, usage.prompt_tokens) - usage.cached_tokens)
        self.output += usage.output_tokens


@dataclass(slots=True, eq=False)
class Program:
    """One program.

    Attributes:
        started_at: arrival of its first request, in seconds on the scheduler's clock.
        stated: whether its client stated an id; otherwise it was recognised by its prompts.
        conversations: those not forgotten yet.
        turns: number of its turns that have ended.
        service: service attained by all of its turns, in the unit of `FairnessSettings`.
        queued_s, waiting_s, engine_s, gap_s: seconds of all its turns: in the queue, thereof without room for
            the context, on replicas, and between turns.
        first_token_s, generation_s: parts of `engine_s`, of streamed turns only.
        tool_gap_s: part of `gap_s` that followed calls of tools.
        saved_tokens: prompt tokens of its turns that were not computed again, as estimated.
        tokens: counts that the engines reported.
    """

    key: ProgramKey
    started_at: float
    stated: bool
    conversations: "set[Conversation]" = field(default_factory=set)
    turns: int = 0
    service: float = 0.0
    queued_s: float = 0.0
    waiting_s: float = 0.0
    engine_s: float = 0.0
    gap_s: float = 0.0
    first_token_s: float = 0.0
    generation_s: float = 0.0
    tool_gap_s: float = 0.0
    saved_tokens: int = 0
    tokens: ProgramTokens = field(default_factory=ProgramTokens)

    @property
    def running(self) -> int:
        """Number of its conversations with a turn on a replica."""
        return sum(1 for one in self.conversations if one.running)

    @property
    def open_agents(self) -> int:
        """Number of its sub-agents that have a turn queued or running."""
        return sum(1 for one in self.conversations if one.parent is not None and one.turns_open)

    def __repr__(self) -> str:
        return (
            f"<Program {'/'.join(self.key)} of {len(self.conversations)} conversations, {self.turns} turns>"
        )


@dataclass(slots=True, eq=False)
class Conversation:
    """One conversation of a program.

    Attributes:
        first_request, first_at: id and arrival of its first request.
        parent: the conversation that launched it; None for the root, and while unknown.
        program: None until its second turn, if the client stated no id.
        session: the id that the client stated; empty if it stated none.
        context_tokens: length of its last prompt and answer.
        messages: number of messages of its last prompt.
        tail: hash of the last block of its last prompt; None if the prompt had no hashes.
        turns_open: number of its turns that are queued or running.
        running: the same, running only.
        replica_id: the replica that has its context cached, or computes it; None if none has.
        evicted: the replica that no longer has its context, as modelled, and the tokens used since its last
            turn at that time, its own included; None after its next turn.
        ended_at: end of its last turn; None if none has been observed.
        ending: how that turn ended.
    """

    tenant: str
    first_request: str
    first_at: float
    parent: "Conversation | None" = None
    program: Program | None = None
    session: str = ""
    context_tokens: int = 0
    messages: int = 0
    tail: int | None = None
    turns_open: int = 0
    running: int = 0
    replica_id: str | None = None
    evicted: tuple[str, int] | None = None
    ended_at: float | None = None
    ending: TurnEnd | None = None

    @property
    def last_at(self) -> float:
        """End of its last turn, or its start."""
        return self.first_at if self.ended_at is None else self.ended_at

    @property
    def is_in_gap(self) -> bool:
        """True if it has had a turn and has none now."""
        return not self.turns_open and self.ended_at is not None

    def __repr__(self) -> str:
        where = f"on {self.replica_id}" if self.replica_id else "not resident"
        return f"<Conversation {self.first_request} {self.context_tokens} tokens {where}>"


@dataclass(slots=True, eq=False)
class ProgramTurn:
    """A request as a turn of its conversation.

    Attributes:
        extends: whether its prompt extends the previous prompt and answer.
        gap_s: time since the end of the previous turn; None if none has been observed.
        bound_until: time until which it waits for the replica of its context.
        parked_since: start of its last wait for room; None if it never waited for that.
        parked_s: duration of its waits for room that have ended.
        resident_on: the replica that it is bound to because its context is there; None for any.
        parked: whether it waits for room for its context.
        admitted_to: the replica whose room it takes until its dispatch; None if it takes none.
        admitted_tokens: the tokens that it takes there.
        depth_tokens: tokens of its context and of what its replica has used since, if that can show the
            replica's unknown capacity; otherwise None.
        content_tokens: tokens that should be cached on its replica; 0 if its own should not.
        first_token_at: time of its first token; None before that, and if it is not streamed.
    """

    conversation: Conversation
    extends: bool
    gap_s: float | None = None
    bound_until: float = 0.0
    parked_since: float | None = None
    parked_s: float = 0.0
    resident_on: str | None = None
    parked: bool = False
    admitted_to: str | None = None
    admitted_tokens: int = 0
    depth_tokens: int | None = None
    content_tokens: int = 0
    first_token_at: float | None = None

    @property
    def program(self) -> Program:
        """The program of its conversation, which has one by the time of a turn."""
        assert self.conversation.program is not None
        return self.conversation.program


# Bounds memory at about 40 MB.
_MOST_CONVERSATIONS = 50_000
# A session id with more conversations is not that of a program.
_MOST_OF_A_PROGRAM = 64
# Conversations that have not returned for longer are forgotten, however few there are.
_FORGET_AFTER_S = 6 * 3_600.0


class ProgramTable:
    """The conversations and programs of one model."""

    def __init__(self) -> None:
        # The one that was used least recently first.
        self._conversations: OrderedDict[Conversation, None] = OrderedDict()
        self._of_tenant: dict[str, OrderedDict[Conversation, None]] = {}
        # The tenant with the most conversations of those that had one added, or would have lost one.
        self._largest = ""
        self._programs: dict[ProgramKey, Program] = {}
        self._by_session: dict[tuple[str, str], Conversation] = {}
        self._by_tail: dict[int, Conversation] = {}
        # Conversations that await the results of tools, by tenant.
        self._awaiting: dict[str, dict[Conversation, None]] = {}

    def on_arrival(self, request: Request, now: float) -> ProgramTurn | None:
        """Return the turn that a request is, or None if it belongs to no program yet."""
        hint, blocks = request.submission.program, request.submission.prefix
        if hint is None and not blocks:
            return None
        found = self._continued(request)
        extends = found is not None
        if hint is not None:
            if found is None or not _is_stated(found, hint):
                found, extends = self._of_session(request, now), False
        elif found is None:
            if request.shape.messages:
                self._remember(self._new(request, self._launcher(request)), request)
            return None
        elif found.program is None:
            self._recognise(found)
        gap_s = now - found.last_at if found.is_in_gap else None
        self._touch(found)
        self._stop_awaiting(found)
        self._remember(found, request)
        found.turns_open += 1
        return ProgramTurn(found, extends, gap_s)

    def on_end(self, conversation: Conversation) -> None:
        """Record that a turn has ended, after its state was updated."""
        if conversation.parent is None and conversation.ending is TurnEnd.TOOLS:
            self._awaiting.setdefault(conversation.tenant, {})[conversation] = None

    def forget(self, now: float) -> Iterator[Conversation]:
        """Forget conversations that have not returned for long, or that are too many. Yield them."""
        for _ in range(len(self._conversations)):
            oldest = next(iter(self._conversations))
            if len(self._conversations) > _MOST_CONVERSATIONS:
                self._compare(oldest.tenant)
                oldest = next(iter(self._of_tenant[self._largest]))
            elif oldest.last_at >= now - _FORGET_AFTER_S:
                return
            if oldest.turns_open:
                # A turn that takes long must not keep the others.
                self._touch(oldest)
                continue
            self._drop(oldest)
            yield oldest

    @property
    def program_count(self) -> int:
        """Number of known programs."""
        return len(self._programs)

    def programs(self) -> list[Program]:
        """Return all programs."""
        return list(self._programs.values())

    def named(self, name: str) -> list[Program]:
        """Return the programs of all tenants with an id."""
        return [program for (_, each), program in self._programs.items() if each == name]

    def recent(self, most: int) -> list[Program]:
        """Return the programs among the `most` conversations that had a turn last, the latest first."""
        latest = islice(reversed(self._conversations), most)
        return list(dict.fromkeys(each.program for each in latest if each.program is not None))

    def __len__(self) -> int:
        return len(self._conversations)

    def __repr__(self) -> str:
        return f"<ProgramTable {len(self._programs)} programs, {len(self)} conversations>"

    def _continued(self, request: Request) -> Conversation | None:
        """Return the conversation whose last prompt this one starts with, the longest first."""
        if request.shape.messages < 2 or not self._by_tail:
            return None
        for block in reversed(request.submission.prefix):
            found = self._by_tail.get(block)
            if found is not None and found.messages < request.shape.messages and not found.turns_open:
                return found
        return None

    def _stated(self, request: Request, now: float) -> Program:
        """Return the program of a new conversation whose client states an id.

        A session id with very many conversations is not that of a program, such as one `prompt_cache_key` for
        all users of an application. Its further conversations become programs of their own.
        """
        hint, tenant = _hint(request), request.tenant
        if hint.program is not None:
            return self._program((tenant, hint.program), now, stated=True)
        key = tenant, hint.parent or hint.session
        for session in (hint.parent, hint.session):
            known = None if session is None else self._by_session.get((tenant, session))
            if known is not None and known.program is not None:
                key = known.program.key
                break
        program = self._programs.get(key)
        if program is not None and len(program.conversations) >= _MOST_OF_A_PROGRAM:
            key = tenant, request.request_id
        return self._program(key, now, stated=True)

    def _of_session(self, request: Request, now: float) -> Conversation:
        """Return the conversation of a stated session, for a prompt that extends no earlier one."""
        hint = _hint(request)
        known = self._by_session.get((request.tenant, hint.session))
        # Clients that use one id for an agent and its sub-agents show by the prompt which of them it is.
        is_chat = bool(request.submission.prefix and request.shape.messages)
        shares_id = hint.program is None and hint.parent is None and is_chat
        if known is not None and _is_stated(known, hint) and not (shares_id or known.turns_open):
            return known
        program = self._stated(request, now)
        launcher = known if shares_id else self._by_session.get((request.tenant, hint.parent or ""))
        if launcher is not None and launcher.program is not program:
            launcher = None
        found = self._new(request, launcher)
        found.program, found.session = program, hint.session
        program.conversations.add(found)
        if known is None:
            self._by_session[request.tenant, hint.session] = found
        return found

    def _launcher(self, request: Request) -> Conversation | None:
        """Return the only conversation of the tenant that awaits tools, or None if there is not just one."""
        awaiting = self._awaiting.get(request.tenant)
        if awaiting is None or len(awaiting) != 1:
            return None
        return next(iter(awaiting))

    def _recognise(self, conversation: Conversation) -> None:
        """Give a conversation without a stated id a program, at its second turn."""
        parent = conversation.parent
        program = None if parent is None else parent.program
        if program is None or self._programs.get(program.key) is not program:
            conversation.parent = None
            key = conversation.tenant, conversation.first_request
            program = self._program(key, conversation.first_at, stated=False)
        conversation.program = program
        program.conversations.add(conversation)

    def _new(self, request: Request, parent: Conversation | None) -> Conversation:
        found = Conversation(request.tenant, request.request_id, request.arrived_at, parent)
        self._conversations[found] = None
        self._of_tenant.setdefault(found.tenant, OrderedDict())[found] = None
        self._compare(found.tenant)
        return found

    def _compare(self, tenant: str) -> None:
        # Not with all tenants, because there may be as many as conversations.
        self._largest = max(self._largest, tenant, key=lambda each: len(self._of_tenant.get(each, ())))

    def _touch(self, conversation: Conversation) -> None:
        """Mark a conversation as the most recently used one."""
        self._conversations.move_to_end(conversation)
        self._of_tenant[conversation.tenant].move_to_end(conversation)

    def _program(self, key: ProgramKey, now: float, *, stated: bool) -> Program:
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(key, now, stated)
        return program

    def _remember(self, conversation: Conversation, request: Request) -> None:
        """Store what identifies the next turn."""
        if conversation.tail is not None and self._by_tail.get(conversation.tail) is conversation:
            del self._by_tail[conversation.tail]
        blocks = request.submission.prefix
        conversation.messages = request.shape.messages
        conversation.tail = blocks[-1] if blocks else None
        if conversation.tail is not None:
            self._by_tail[conversation.tail] = conversation

    def _stop_awaiting(self, conversation: Conversation) -> None:
        awaiting = self._awaiting.get(conversation.tenant)
        if awaiting is not None:
            awaiting.pop(conversation, None)
            if not awaiting:
                del self._awaiting[conversation.tenant]

    def _drop(self, conversation: Conversation) -> None:
        del self._conversations[conversation]
        of_tenant = self._of_tenant[conversation.tenant]
        del of_tenant[conversation]
        if not of_tenant:
            del self._of_tenant[conversation.tenant]
        self._stop_awaiting(conversation)
        if conversation.tail is not None and self._by_tail.get(conversation.tail) is conversation:
            del self._by_tail[conversation.tail]
        session = (conversation.tenant, conversation.session)
        if self._by_session.get(session) is conversation:
            del self._by_session[session]
        program = conversation.program
        if program is not None:
            program.conversations.discard(conversation)
            if not program.conversations:
                self._programs.pop(program.key, None)


def _hint(request: Request) -> ProgramHint:
    hint = request.submission.program
    assert hint is not None
    return hint


def _is_stated(conversation: Conversation, hint: ProgramHint) -> bool:
    """Return whether a conversation is of the stated session and program."""
    program = conversation.program
    of_program = program is not None and hint.program in (None, program.key[1])
    return of_program and conversation.session == hint.session
