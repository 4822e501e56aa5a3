"""Receipts of programs: where the time of a program's turns went, in total and by turn.

The sums cover all turns since the scheduler started. Turns are listed as long as their receipts are kept. The
first request of a conversation without a stated id is not a turn yet, and is not included.
"""

import asyncio
from itertools import chain
from typing import Any

from serve_app.core import Scheduler
from serve_app.core.accounting.wait_causes import WaitCause
from serve_app.core.programs.program import Program, ProgramTurn
from serve_app.core.programs.program_scheduler import program_document
from serve_app.serving.scheduler.history import HistoryRecord, RequestHistory

_MOST_TURNS = 50
# Requests examined before yielding to the event loop: less than a millisecond.
_LOOKED_AT = 2_000


async def programs_named(name: str, core: Scheduler, history: RequestHistory, now: float) -> dict[str, Any]:
    """Return the receipts of all tenants' programs with an id."""
    model, found = core.settings.model, core.programs.table.named(name)
    documents = [
        {"model": model, **program_document(core.programs, program, now), "last_turns": []}
        for program in found
    ]
    for program, document in zip(found, documents, strict=True):
        document["last_turns"] = await _turns(program, history, now)
    return {"model": model, "programs": documents}


async def _turns(program: Program, history: RequestHistory, now: float) -> list[dict[str, Any]]:
    """Return the last turns, the earliest first. All times are in seconds."""
    found: list[dict[str, Any]] = []
    for looked_at, known in enumerate(chain(reversed(history.open()), reversed(history.ended())), start=1):
        if looked_at % _LOOKED_AT == 0:
            await asyncio.sleep(0)
        if known.turn is not None and known.turn.conversation.program is program:
            found.append(_turn(known, known.turn, now))
            if len(found) == _MOST_TURNS:
                break
    # The sort is stable, so that turns of one instant stay in their order.
    found.reverse()
    return sorted(found, key=lambda each: -each["arrived_s_ago"])


def _turn(known: HistoryRecord, turn: ProgramTurn, now: float) -> dict[str, Any]:
    times, usage = known.times, known.usage
    conclude, waits = known.conclude, known.last is None and known.conclude is None
    room_ns = known.waited.causes.get(WaitCause.RESIDENCY, 0)
    first_token_s = times.first_token_s if times is not None else None
    engine_s = times.engine_s if times is not None else None
    return {
        "request_id": known.request_id,
        "session": turn.conversation.session,
        "is_sub_agent": turn.conversation.parent is not None,
        "state": conclude.conclusion.outcome.value if conclude is not None else "open",
        "arrived_s_ago": now - known.arrived_at,
        "gap_s": turn.gap_s,
        "queued_s": now - known.arrived_at if waits else known.wait_s,
        "waiting_s": None if waits else room_ns / 1e9,
        "first_token_s": first_token_s,
        "generation_s": None if engine_s is None or first_token_s is None else engine_s - first_token_s,
        "engine_s": engine_s,
        "prompt_tokens": usage.prompt_tokens if usage is not None else None,
        "cached_tokens": usage.cached_tokens if usage is not None else None,
        "output_tokens": usage.output_tokens if usage is not None else None,
    }
