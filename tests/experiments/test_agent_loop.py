"""The closed loop of the experiment `agents`; what all loops have in common: `test_agent_baselines`."""

from collections import Counter
from typing import Any

import pytest

from experiments.agents.closed_loop import LoopSettings, ProgramRun, play_programs
from experiments.agents.programs import BLOCK_TOKENS, Program
from serve_app.errors import Outcome
from tests.experiments.agents import (
    by_turn,
    chain,
    fleet,
    generated,
    play,
    small_programs,
    turn,
    with_agents,
)
from tests.lab.simulation.builders import mixed_requests

# Time from the last token on an engine to the scheduler.
LATENCY_S = 0.001
GENERATED = generated(6, 11)
SCHEDULERS: dict[str, dict[str, Any]] = {"programs": {}, "requests": {"programs.enabled": False}}


def test_programs_start_a_second_apart_and_then_at_the_end_of_another() -> None:
    result = play(small_programs(5), concurrency=3)
    records = by_turn(result.records)
    starts = [records[f"chain-6#{number}", 0].arrived_at for number in range(5)]
    ends = sorted(records[f"chain-6#{number}", 5].finished_at for number in range(5))
    assert starts == pytest.approx([0.0, 1.0, 2.0, ends[0] + LATENCY_S, ends[1] + LATENCY_S])


def test_programs_are_assigned_to_tenants_in_turn() -> None:
    result = play(small_programs(6, turns=2), tenants=3)
    tenants = {record.request_id.split("/")[0]: record.tenant for record in result.records}
    assert tenants == {f"chain-2#{number}": f"tenant-{1 + number % 3}" for number in range(6)}
    assert Counter(record.tenant for record in result.records) == dict.fromkeys(set(tenants.values()), 4)


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


def test_generated_programs_compute_the_ideal_prefill_with_a_large_cache() -> None:
    result = play(GENERATED, fleet=fleet(20_000_000, replicas=1))
    assert result.prefill_tokens == pytest.approx(result.ideal_prefill_tokens, rel=0.002)


def test_the_figures_count_from_the_start_of_a_program_to_the_end_of_its_last_turn() -> None:
    made = small_programs(4)
    result = play(made, concurrency=4)
    records = by_turn(result.records)
    assert result.jct_s == {
        number: pytest.approx(records[f"chain-6#{number}", 5].finished_at + LATENCY_S - number)
        for number in range(4)
    }
    assert result.prompt_tokens == 4 * sum(one.prompt_tokens for one in made[0].turns)


def test_settings_of_the_scheduler_are_applied() -> None:
    programs, requests = (play(GENERATED, 400_000, scheduler=changes) for changes in SCHEDULERS.values())
    assert programs.records != requests.records


# A program in progress


def test_turns_become_due_when_all_turns_before_them_have_ended() -> None:
    run = ProgramRun(with_agents(), 0, "t", started_at=5.0)
    assert run.due(None) == [(0, 5.0)]
    run.on_start(0)
    run.on_end(0, 7.0)
    assert run.due(0) == [(1, 7.5)]
    run.on_end(1, 9.0)
    assert run.due(1) == [(2, 9.0), (4, 12.0)]
    run.on_end(2, 10.0)
    run.on_end(3, 20.0)
    assert run.due(3) == []
    run.on_end(4, 13.0)
    # The gap counts from the last end.
    assert run.due(4) == [(5, 20.5)]
    assert not run.is_over
    run.on_end(5, 21.0)
    assert run.is_over
    assert run.due(5) == []


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
