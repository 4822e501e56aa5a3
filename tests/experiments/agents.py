"""Agent programs, and runs of them."""

from collections.abc import Sequence
from typing import Any

from experiments.agents.closed_loop import LoopSettings, MakeLoop, ProgramLoop, ProgramResult, play_programs
from experiments.agents.programs import BLOCK_TOKENS, Program, Turn, generate_programs, with_gaps_up_to
from serve_app.core.metrics.record import RequestRecord
from serve_app.lab.simulation.run import ONE_POOL, EngineChanges, FleetSettings

PROFILE = "llama31-8b-h100-tp1"


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


def with_agents(gap_s: float = 0.5) -> Program:
    """Return a program whose first turn launches two sub-agents, which its third turn joins."""
    return Program(
        "agents",
        (
            turn(1_000, 50),
            turn(1_400, 40, after=(0,), gap_s=gap_s, known=15),
            turn(600, 400, after=(1,), session=1),
            turn(1_100, 30, after=(2,), gap_s=gap_s, source=2, known=9, session=1),
            turn(700, 20, after=(1,), gap_s=3.0, session=2),
            turn(2_000, 60, after=(1, 3, 4), gap_s=gap_s, source=1, known=21),
        ),
    )


def small_programs(count: int, turns: int = 6, **lengths: Any) -> list[Program]:
    return [chain(turns, **lengths) for _ in range(count)]


def generated(count: int, seed: int, turns: int = 16) -> list[Program]:
    """Return the first turns of generated programs, with gaps up to 20 s."""
    made = with_gaps_up_to(generate_programs(count, seed), 20.0)
    return [Program(one.name, one.turns[:turns]) for one in made]


def fleet(
    kv_tokens: int = 2_000_000, *, replicas: int = 2, profile: str = PROFILE, max_model_len: int = 250_000
) -> FleetSettings:
    engine = EngineChanges(kv_tokens=kv_tokens, max_model_len=min(max_model_len, kv_tokens))
    return FleetSettings(profile=profile, replicas={ONE_POOL: replicas}, engine=engine)


def play(
    made: Sequence[Program],
    kv_tokens: int = 2_000_000,
    loop: MakeLoop = ProgramLoop,
    **changes: Any,
) -> ProgramResult:
    values: dict[str, Any] = {"fleet": fleet(kv_tokens), "concurrency": 4}
    return play_programs(LoopSettings(**(values | changes)), made, loop=loop)


def by_turn(records: Sequence[RequestRecord]) -> dict[tuple[str, int], RequestRecord]:
    """Return records by the program with its number, and by the index of their turn."""
    found = {}
    for record in records:
        name, _, index = record.request_id.partition("/")
        found[name, int(index)] = record
    assert len(found) == len(records)
    return found


def most_in_progress(result: ProgramResult) -> int:
    """Return the largest number of programs that were in progress at a time."""
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    for (name, _), record in by_turn(result.records).items():
        starts[name] = min(starts.get(name, record.arrived_at), record.arrived_at)
        ends[name] = max(ends.get(name, 0.0), record.finished_at)
    in_progress, most = 0, 0
    # An end at the time of a start comes first.
    for _, change in sorted([(at, 1) for at in starts.values()] + [(at, -1) for at in ends.values()]):
        in_progress += change
        most = max(most, in_progress)
    return most
