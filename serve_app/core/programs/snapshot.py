"""A snapshot of the programs, for operators."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from serve_app.core.programs.program import Program
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


# Examining all of them would delay grants.
_EXAMINED = 1_000


def programs_document(programs: ProgramScheduler, now: float, most: int) -> dict[str, Any]:
    """Return sums, the recent programs by state, and the rows of the last `most` of them."""
    recent = programs.table.recent(_EXAMINED)
    return {
        "known": programs.table.program_count,
        "recent_by_state": dict(Counter(_state(programs, program) for program in recent)),
        "parked": len(programs.parked),
        "turns": programs.turns,
        "saved_tokens": programs.saved_tokens,
        "moved": programs.moved,
        "forced": programs.forced,
        "rows": [asdict(_row(programs, program, now)) for program in recent[:most]],
    }


def program_document(programs: ProgramScheduler, program: Program, now: float) -> dict[str, Any]:
    """Return the row of one program, and where its time went."""
    return {
        **asdict(_row(programs, program, now)),
        "first_token_s": program.first_token_s,
        "generation_s": program.generation_s,
        "tool_gap_s": program.tool_gap_s,
        "tokens": asdict(program.tokens),
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
