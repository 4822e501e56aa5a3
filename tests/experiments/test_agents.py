"""The experiment `agents`: its closed loop, and the baselines in it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from experiments.agents.baselines import LOOPS, Fits, GatedRun, ToolPause
from experiments.agents.closed_loop import LoopSettings, ProgramResult, ProgramRun, play_programs
from experiments.agents.programs import BLOCK_TOKENS, Program
from serve_app.core.programs import residency
from serve_app.core.programs.residency import LearnedCapacity
from serve_app.errors import Outcome
from tests.experiments import agents
from tests.experiments.agents import (
    by_turn,
    chain,
    fleet,
    generated,
    most_in_progress,
    play,
    small_programs,
    turn,
    with_agents,
)
from tests.lab.simulation.builders import mixed_requests, plan

# Time from the last token on an engine to the scheduler.
LATENCY_S = 0.001
GENERATED = generated(6, 11)
SCHEDULERS: dict[str, dict[str, Any]] = {"programs": {}, "requests": {"programs.enabled": False}}


def test_programs_start_a_second_apart_and_then_at_the_end_of_another_for_tenants_in_turn() -> None:
    made = small_programs(5)
    result = play(made, concurrency=3, tenants=2)
    records = by_turn(result.records)
    starts = [records[f"chain-6#{number}", 0].arrived_at for number in range(5)]
    ends = [records[f"chain-6#{number}", 5].finished_at + LATENCY_S for number in range(5)]
    assert starts == pytest.approx([0.0, 1.0, 2.0, *sorted(ends)[:2]])
    tenants = {(name, record.tenant) for (name, _), record in records.items()}
    assert tenants == {(f"chain-6#{number}", f"tenant-{1 + number % 2}") for number in range(5)}
    # Figures count from the start of a program to the end of its last turn.
    assert result.jct_s == {number: pytest.approx(ends[number] - starts[number]) for number in range(5)}
    assert result.prompt_tokens == 5 * sum(one.prompt_tokens for one in made[0].turns)


def test_recognised_programs_are_served_nearly_as_well_as_stated_ones() -> None:
    stated, recognised = (play(GENERATED, 400_000, states_ids=states_ids) for states_ids in (True, False))
    assert {record.outcome for record in recognised.records} == {Outcome.COMPLETED}
    assert recognised.prefill_tokens < 1.5 * stated.prefill_tokens


def test_requests_without_a_program_are_served_beside_programs() -> None:
    others = mixed_requests(30, rate_per_s=2.0, seed=3)
    result = play_programs(LoopSettings(fleet=fleet(), concurrency=2), small_programs(3), others)
    assert len(result.records) == 30 + 3 * 6
    assert {f"r{number}" for number in range(30)} < {record.request_id for record in result.records}
    assert result.summary.completed == 3 * 6
    assert set(result.jct_s) == {0, 1, 2}


# Figures


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_nothing_is_computed_twice_with_a_large_cache(scheduler: str) -> None:
    # Prompts and answers end inside a block: the last token of an answer is never cached.
    made = [*(chain(8, output=70) for _ in range(3)), with_agents()]
    result = play(made, concurrency=1, fleet=fleet(replicas=1), scheduler=SCHEDULERS[scheduler])
    assert result.ideal_prefill_tokens == sum(sum(one.ideal_prefills()) for one in made)
    # An engine's blocks are smaller, so it finds up to three more of them.
    turns = sum(len(one.turns) for one in made)
    assert 0 <= result.ideal_prefill_tokens - result.prefill_tokens < turns * BLOCK_TOKENS


# A program in progress


def test_a_conversation_gains_two_messages_per_turn_until_most_of_it_is_dropped() -> None:
    run = ProgramRun(
        Program(
            "p",
            (
                turn(1_280),
                turn(1_600, after=(0,), known=20),
                turn(900, after=(1,), source=1, known=3),
                turn(640, after=(0,), session=1),
            ),
        ),
        0,
        "t",
        0.0,
    )
    assert [run.on_start(index) for index in range(4)] == [2, 4, 2, 2]


def test_a_turn_states_its_session_program_and_parent() -> None:
    run = ProgramRun(with_agents(), 3, "t", 0.0)
    root, agent = run.hint(5), run.hint(3)
    assert (root.session, root.program, root.parent) == ("agents#3/0", "agents#3", None)
    assert (agent.session, agent.program, agent.parent) == ("agents#3/1", "agents#3", "agents#3/0")


# -- baselines: routers, gates and exact caches -----------------------------------------------------------

# The schedulers above, and the baselines.
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"scheduler": changes} for name, changes in SCHEDULERS.items()},
    **{name: {"loop": loop} for name, loop in LOOPS.items() if name != "exact-caches"},
}


def play_baseline(
    baseline: str, made: Sequence[Program], kv_tokens: int = 2_000_000, **changes: Any
) -> ProgramResult:
    return agents.play(made, kv_tokens, LOOPS[baseline], **changes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_turn_is_played_once_and_starts_when_its_gap_has_passed(variant: str) -> None:
    made = [with_agents(), chain(4), with_agents(0.0), chain(3, gap_s=0.0), with_agents()]
    result = agents.play(made, concurrency=2, **VARIANTS[variant])
    latency_s = 0.0 if "loop" in VARIANTS[variant] else LATENCY_S
    records = by_turn(result.records)
    assert len(records) == sum(len(program.turns) for program in made)
    assert {record.outcome for record in result.records} == {Outcome.COMPLETED}
    for number, program in enumerate(made):
        name = f"{program.name}#{number}"
        for index, one in enumerate(program.turns):
            if one.after:
                ended = max(records[name, before].finished_at for before in one.after) + latency_s
                assert records[name, index].arrived_at == pytest.approx(ended + one.gap_s, abs=1e-9)


@pytest.mark.parametrize("variant", ["programs", "tool-pause", "oracle"])
@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_as_many_programs_as_allowed_are_in_progress(variant: str, concurrency: int) -> None:
    result = agents.play(small_programs(9, gap_s=3.0), concurrency=concurrency, **VARIANTS[variant])
    assert (len(result.jct_s), most_in_progress(result)) == (9, min(concurrency, 9))


def test_a_result_follows_from_the_settings() -> None:
    variants = ("programs", "requests", "kv-overlap", "tool-pause")
    first, second = (
        [agents.play(GENERATED, 400_000, **VARIANTS[name]) for name in variants] for _ in range(2)
    )
    assert first == second
    assert first[0].records != first[1].records


def test_a_small_cache_costs_more_prefill_without_the_oracle() -> None:
    made = small_programs(8, turns=10, first=3_200, added=640, gap_s=4.0)
    results = {
        policy: play_baseline(
            policy, made, 24_000, fleet=fleet(24_000, replicas=1, max_model_len=20_000), concurrency=8
        )
        for policy in ("least-load", "oracle", "tool-pause")
    }
    prefills = {policy: result.prefill_tokens for policy, result in results.items()}
    ideal = results["oracle"].ideal_prefill_tokens
    assert ideal <= prefills["oracle"] < 1.1 * ideal
    assert prefills["least-load"] > 2 * prefills["oracle"]
    assert prefills["oracle"] <= prefills["tool-pause"] < prefills["least-load"]


def test_the_longest_wait_is_from_the_arrival_of_a_turn_to_its_dispatch() -> None:
    made = small_programs(6, turns=3, first=6_400)
    result = play_baseline("oracle", made, concurrency=6, fleet=fleet(8_000, replicas=1))
    waits = [record.queue_wait_s for record in result.records]
    assert result.max_wait_s > 1.0
    assert result.max_wait_s == pytest.approx(max(one for one in waits if one is not None))


def test_the_working_set_has_the_last_context_of_each_conversation() -> None:
    run = GatedRun(with_agents(), 0, "t", 0.0)
    assert run.tokens == 1_000
    run.on_start(0)
    assert run.tokens == 1_050
    run.on_start(1)
    run.on_start(2)
    assert run.tokens == 1_440 + 1_000
    run.on_start(3)
    assert run.tokens == 1_440 + 1_130
    assert run.largest_tokens == 2_060 + 1_130 + 720


# Gates


def started(number: int, prompt_tokens: int, output_tokens: int = 100, *, turns: int = 2) -> GatedRun:
    """Return a program whose first turn was due at its number."""
    made = tuple(
        turn(prompt_tokens, output_tokens, after=(index - 1,) if index else ()) for index in range(turns)
    )
    return GatedRun(Program(f"p{number}", made), number, "t", float(number))


def run_turn(run: GatedRun, index: int, now: float) -> None:
    run.on_start(index)
    run.on_end(index, now)


def test_the_oracle_starts_what_fits_at_its_largest_and_releases_it_at_the_end() -> None:
    gate = Fits([plan("a", "all", kv_tokens=8_000)])
    first, second, third = (started(number, 3_900) for number in range(3))
    assert [gate.place(run, 0.0) for run in (first, second, third)] == ["a", "a", None]
    run_turn(first, 0, 1.0)
    gate.on_turn_end(first)
    assert gate.place(third, 1.0) is None
    assert gate.place(first, 1.0) == "a"
    run_turn(first, 1, 2.0)
    gate.on_turn_end(first)
    assert gate.place(third, 2.0) == "a"


def test_the_oracle_places_on_the_emptiest_engine_and_stays_there() -> None:
    gate = Fits([plan("a", "all", kv_tokens=8_000), plan("b", "all", kv_tokens=6_000)])
    runs = [started(number, 2_900) for number in range(5)]
    assert [gate.place(run, 0.0) for run in runs] == ["a", "b", "a", "b", None]
    assert [gate.place(run, 0.0) for run in runs] == ["a", "b", "a", "b", None]


def test_the_oracle_starts_a_program_that_never_fits_alone() -> None:
    gate = Fits([plan("a", "all", kv_tokens=8_000)])
    huge, small = started(0, 20_000), started(1, 100)
    assert gate.place(huge, 0.0) == "a"
    assert gate.place(small, 0.0) is None


def test_tool_pause_pauses_the_largest_idle_programs_down_to_its_target() -> None:
    gate = ToolPause([plan("a", "all", kv_tokens=10_000)])
    sizes = (1_500, 1_300, 900, 900, 800, 800, 800)
    runs = [started(number, size, 100, turns=3) for number, size in enumerate(sizes)]
    assert all(gate.place(run, 0.0) == "a" for run in runs)
    for run in runs[2:]:
        run_turn(run, 0, 1.0)
        gate.on_turn_end(run)
    # Two are running, so only smaller ones can be paused. The program of 900 tokens grows to 3,300.
    runs[0].on_start(0)
    runs[1].on_start(0)
    grown = Program("p", (turn(900, 100), turn(3_200, 100, after=(0,))))
    runs[2].program = grown
    run_turn(runs[2], 1, 2.0)
    assert sum(run.tokens for run in runs) == 1_600 + 1_400 + 3_300 + 1_000 + 3 * 900
    gate.on_turn_end(runs[2])
    # The largest idle one is enough: 6,700 of 10,000 tokens are left.
    assert gate.place(started(7, 1_801), 2.0) is None
    assert gate.place(started(8, 1_800), 2.0) == "a"
    # Another start of it would exceed 85 %.
    assert gate.place(runs[2], 3.0) is None
    runs[2].due_at = 3.0
    assert gate.place(runs[2], 3.0 + 1_799.0) is None
    assert gate.place(runs[2], 3.0 + 1_800.0) == "a"


def test_tool_pause_pauses_nothing_below_its_threshold() -> None:
    gate = ToolPause([plan("a", "all", kv_tokens=10_000)])
    runs = [started(number, 1_050, 100) for number in range(8)]
    assert all(gate.place(run, 0.0) == "a" for run in runs)
    for run in runs:
        run_turn(run, 0, 1.0)
        gate.on_turn_end(run)
    # 92 % are used.
    assert gate.place(started(8, 100), 1.0) is None


def test_tool_pause_forgets_completed_programs() -> None:
    gate = ToolPause([plan("a", "all", kv_tokens=10_000)])
    first, second = started(0, 8_000, turns=1), started(1, 8_000)
    assert [gate.place(run, 0.0) for run in (first, second)] == ["a", None]
    run_turn(first, 0, 1.0)
    gate.on_turn_end(first)
    assert gate.place(second, 1.0) == "a"


def test_tool_pause_resumes_on_the_least_used_engine() -> None:
    gate = ToolPause([plan("a", "all", kv_tokens=10_000), plan("b", "all", kv_tokens=4_000)])
    runs = [started(number, 1_000) for number in range(4)]
    # By the share of the cache: a has 0, then 10, 10, 20 and b 0, 0, 25, 25 percent.
    assert [gate.place(run, 0.0) for run in runs] == ["a", "b", "a", "a"]


def test_a_program_larger_than_the_cache_is_started_alone_by_tool_pause() -> None:
    gate = ToolPause([plan("a", "all", kv_tokens=4_000)])
    assert gate.place(started(0, 20_000), 0.0) == "a"


def test_turns_of_one_program_follow_each_other() -> None:
    result = play_baseline("tool-pause", small_programs(6, turns=5), fleet=fleet(3_008, replicas=1))
    records = by_turn(result.records)
    for number in range(6):
        turns = [records[f"chain-5#{number}", index] for index in range(5)]
        assert all(one.finished_at <= other.arrived_at for one, other in pairwise(turns))


# -- a replica that reports neither its load nor the size of its KV cache ---------------------------------

KV_TOKENS = 400_000
PROGRAMS = generated(20, 2, turns=40)


def prefill_tokens(*, reports_load: bool) -> int:
    one = fleet(KV_TOKENS, replicas=1, profile="llama3-70b-h100-tp4")
    return play(PROGRAMS, fleet=replace(one, reports_load=reports_load), concurrency=12).prefill_tokens


@pytest.mark.application
@pytest.mark.parametrize("assumed", [100_000, 2_000_000])
def test_a_capacity_that_is_learned_is_nearly_as_good_as_a_reported_one(
    assumed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "LIKELY_KV_TOKENS", assumed)
    reported, learned = (prefill_tokens(reports_load=reports) for reports in (True, False))
    monkeypatch.setattr(LearnedCapacity, "on_hit", lambda *_: None)
    monkeypatch.setattr(LearnedCapacity, "on_miss", lambda *_: None)
    wrong = prefill_tokens(reports_load=False)
    assert learned < 1.3 * reported
    assert learned < 0.8 * wrong
