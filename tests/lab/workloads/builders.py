"""Traces and agent programs for tests."""

import gzip
import json
from pathlib import Path
from typing import Any

from serve_app.lab.workloads.programs import BLOCK_TOKENS, Program, Programs, Turn
from serve_app.lab.workloads.trace import Trace, TraceRequest
from serve_app.request import TurnEnd


def trace(*arrivals_s: float, name: str = "t") -> Trace:
    """Return requests at these times; the n-th has n prompt tokens, which identify it."""
    requests = tuple(
        TraceRequest(arrival_s=at, prompt_tokens=number, output_tokens=5)
        for number, at in enumerate(arrivals_s, start=1)
    )
    return Trace(name=name, source="made for a test", requests=requests)


def turn_row(row: int, prompt_tokens: int, blocks: tuple[int, int, int], **changes: Any) -> dict[str, Any]:
    """Return a line of a programs file: a turn that follows the one before it after two seconds."""
    plain = {
        "program": "p",
        "row": row,
        "after": [row - 1] if row else [],
        "gap_s": 2.0 if row else None,
        "prompt_tokens": prompt_tokens,
        "output_tokens": 10,
        "blocks": list(blocks),
    }
    return plain | changes


def write_rows(path: Path, *rows: dict[str, Any] | str) -> Path:
    """Write lines of a programs file, as objects or as text."""
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines, encoding="utf-8")
    return path


def rows_of(program: Program) -> list[dict[str, Any]]:
    """Return the lines of a programs file with this program."""
    stops = {TurnEnd.TOOLS: "tool_use", TurnEnd.DONE: "end_turn"}
    return [
        {
            "program": program.name,
            "session": turn.session,
            "row": row,
            "after": list(turn.after),
            "gap_net_s": turn.gap_s,
            "prompt_tokens": turn.prompt_tokens,
            "output_tokens": turn.output_tokens,
            "blocks": [turn.source, turn.known, turn.new],
            "stop": stops.get(turn.ending) if turn.ending else None,
        }
        for row, turn in enumerate(program.turns)
    ]


def turn(
    prompt_tokens: int,
    output_tokens: int = 10,
    *,
    after: tuple[int, ...] = (),
    gap_s: float = 0.0,
    source: int = 0,
    known: int = 0,
    session: int = 0,
) -> Turn:
    """Return a turn whose prompt starts with `known` blocks of the turn `source`."""
    return Turn(
        session=session,
        after=after,
        gap_s=gap_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        source=source,
        known=known,
        new=prompt_tokens // BLOCK_TOKENS - known,
    )


def chain(turns: int, *, first: int = 640, added: int = 192, output: int = 64, gap_s: float = 1.0) -> Program:
    """Return a program of one conversation, whose prompts contain those before them."""
    prompts = [first + (added + output) * number for number in range(turns)]
    return Program(
        f"chain-{turns}",
        tuple(
            turn(tokens, output)
            if not number
            else turn(
                tokens,
                output,
                after=(number - 1,),
                gap_s=gap_s,
                source=number - 1,
                known=prompts[number - 1] // BLOCK_TOKENS,
            )
            for number, tokens in enumerate(prompts)
        ),
    )


def programs(*members: Program) -> Programs:
    """Return the programs of a run."""
    return Programs(name="t", source="made for a test", programs=members)
