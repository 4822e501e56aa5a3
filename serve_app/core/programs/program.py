"""A program and its conversations.

A program is a tree of conversations: that of an agent and those of its sub-agents. A conversation is a
sequence of turns, each of which is one request whose prompt usually extends the previous one.
"""

from dataclasses import dataclass, field

from serve_app.request import TurnEnd, Usage

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
