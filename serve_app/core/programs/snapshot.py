"""A snapshot of the programs, for operators."""

from collections import Counter
from dataclasses import asdict, dataclass
from heapq import nlargest
from typing import Any

from serve_app.core.programs.program import Conversation, Program
from serve_app.core.programs.program_scheduler import ProgramScheduler


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """One program.

    Attributes:
        program: the id that its client stated, or the id of its first request.
        state: `running`, `waiting` (for room), `queued` (for a replica) or `in a gap`.
        replicas: the replicas with its contexts.
        context_tokens: tokens of the last contexts of all its conversations.
        turns, saved_tokens: number of its turns so far, and the tokens of their prompts that were cached.
        queued_s, waiting_s, engine_s, gap_s: as in `Program`.
    """

    program: str
    tenant: str
    state: str
    conversations: int
    replicas: tuple[str, ...]
    context_tokens: int
    turns: int
    saved_tokens: int
    queued_s: float
    waiting_s: float
    engine_s: float
    gap_s: float
    age_s: float


def program_rows(programs: ProgramScheduler, now: float, most: int) -> list[ProgramRow]:
    """Return the programs that were active last, at most `most`."""
    latest = nlargest(most, programs.table.programs(), key=_last_at)
    return [_row(programs, program, now) for program in latest]


def programs_document(programs: ProgramScheduler, now: float, most: int) -> dict[str, Any]:
    """Return the number of programs by state, sums, and the rows of those that were active last."""
    known = programs.table.programs()
    return {
        "known": len(known),
        "by_state": dict(Counter(_state(programs, program) for program in known)),
        "parked": len(programs.parked),
        "turns": programs.turns,
        "saved_tokens": programs.saved_tokens,
        "moved": programs.moved,
        "forced": programs.forced,
        "rows": [asdict(row) for row in program_rows(programs, now, most)],
    }


def _row(programs: ProgramScheduler, program: Program, now: float) -> ProgramRow:
    tenant, name = program.key
    conversations = program.conversations
    return ProgramRow(
        program=name,
        tenant=tenant,
        state=_state(programs, program),
        conversations=len(conversations),
        replicas=tuple(sorted({each.replica_id for each in conversations if each.replica_id is not None})),
        context_tokens=sum(each.context_tokens for each in conversations),
        turns=program.turns,
        saved_tokens=program.saved_tokens,
        queued_s=program.queued_s,
        waiting_s=program.waiting_s,
        engine_s=program.engine_s,
        gap_s=program.gap_s,
        age_s=now - program.started_at,
    )


def _state(programs: ProgramScheduler, program: Program) -> str:
    if program.running:
        return "running"
    if programs.parked.of_program(program):
        return "waiting"
    return "queued" if any(each.turns_open for each in program.conversations) else "in a gap"


def _last_at(program: Program) -> float:
    return max((_active_at(each) for each in program.conversations), default=program.started_at)


def _active_at(conversation: Conversation) -> float:
    return float("inf") if conversation.turns_open else conversation.last_at
