from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome, SettingsError
from serve_app.lab.simulation.fleet import ONE_POOL, EngineChanges, FleetSettings
from serve_app.lab.simulation.programs import (
    PROGRAM_POLICIES,
    ProgramResult,
    ProgramRun,
    ProgramSettings,
    alone_times,
    play_programs,
)
from serve_app.lab.simulation.simulation import SimulationSettings
from serve_app.lab.workloads.programs import BLOCK_TOKENS, Program, Programs, generate_programs
from serve_app.lab.workloads.trace import TraceError
from tests.lab.simulation.builders import mixed_requests
from tests.lab.workloads.builders import chain, programs, turn

PROFILE = "llama31-8b-h100-tp1"
SCHEDULED = ("ewsjf", "prefix-affinity", "fcfs")
# Time from the last token on an engine to the scheduler.
LATENCY_S = 0.001


def fleet(
    kv_tokens: int = 2_000_000, *, replicas: int = 2, profile: str = PROFILE, max_model_len: int = 250_000
) -> FleetSettings:
    engine = EngineChanges(kv_tokens=kv_tokens, max_model_len=min(max_model_len, kv_tokens))
    return FleetSettings(profile=profile, replicas={ONE_POOL: replicas}, engine=engine)


def play(policy: str, made: Programs, kv_tokens: int = 2_000_000, **changes: Any) -> ProgramResult:
    values: dict[str, Any] = {"policy": policy, "fleet": fleet(kv_tokens), "concurrency": 4}
    return play_programs(ProgramSettings(**(values | changes)), made)


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


def small_programs(count: int, turns: int = 6, **lengths: Any) -> Programs:
    return programs(*(chain(turns, **lengths) for _ in range(count)))


def by_turn(records: Sequence[RequestRecord]) -> dict[tuple[str, int], RequestRecord]:
    """Return records by the program with its number, and by the index of their turn."""
    found = {}
    for record in records:
        name, _, index = record.request_id.partition("/")
        found[name, int(index)] = record
    assert len(found) == len(records)
    return found


def spans(result: ProgramResult) -> list[tuple[float, float]]:
    """Return the start and the end of each program."""
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    for (name, _), record in by_turn(result.records).items():
        starts[name] = min(starts.get(name, record.arrived_at), record.arrived_at)
        ends[name] = max(ends.get(name, 0.0), record.finished_at)
    return [(starts[name], ends[name]) for name in starts]


# The closed loop

GENERATED = programs(
    *(Program(one.name, one.turns[:16]) for one in generate_programs(6, 11).with_gaps_up_to(20.0).programs)
)


@pytest.mark.parametrize("policy", [*SCHEDULED, "direct"])
def test_every_turn_is_played_once_and_starts_when_its_gap_has_passed(policy: str) -> None:
    made = programs(with_agents(), chain(4), with_agents(0.0), chain(3, gap_s=0.0), with_agents())
    result = play(policy, made, concurrency=2)
    records = by_turn(result.records)
    expected = {
        (f"{program.name}#{number}", index)
        for number, program in enumerate(made.programs)
        for index in range(len(program.turns))
    }
    assert set(records) == expected
    assert {record.outcome for record in result.records} == {Outcome.COMPLETED}
    latency_s = LATENCY_S if policy in SCHEDULED else 0.0
    for number, program in enumerate(made.programs):
        name = f"{program.name}#{number}"
        for index, one in enumerate(program.turns):
            if one.after:
                ended = max(records[name, before].finished_at for before in one.after) + latency_s
                assert records[name, index].arrived_at == pytest.approx(ended + one.gap_s, abs=1e-9)


@pytest.mark.parametrize("policy", ["ewsjf", "direct"])
@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_as_many_programs_as_allowed_are_in_progress(policy: str, concurrency: int) -> None:
    result = play(policy, small_programs(9, gap_s=3.0), concurrency=concurrency)
    assert len(result.jct_s) == 9
    edges = [edge for start, end in spans(result) for edge in ((start, 1), (end, -1))]
    in_progress, most = 0, 0
    # An end at the time of a start comes first.
    for _, change in sorted(edges):
        in_progress += change
        most = max(most, in_progress)
    assert most == min(concurrency, 9)


def test_programs_start_a_second_apart_and_then_at_the_end_of_another() -> None:
    result = play("direct", small_programs(5), concurrency=3)
    records = by_turn(result.records)
    starts = [records[f"chain-6#{number}", 0].arrived_at for number in range(5)]
    ends = sorted(records[f"chain-6#{number}", 5].finished_at for number in range(5))
    assert starts == [0.0, 1.0, 2.0, *ends[:2]]


@pytest.mark.parametrize("policy", ["ewsjf", "direct"])
def test_the_same_settings_give_the_same_result(policy: str) -> None:
    first, second = (play(policy, GENERATED, 400_000) for _ in range(2))
    assert first == second
    assert first.as_json() == second.as_json()


def test_programs_are_assigned_to_tenants_in_turn() -> None:
    result = play("ewsjf", small_programs(6, turns=2), tenants=3)
    tenants = {record.request_id.split("/")[0]: record.tenant for record in result.records}
    assert tenants == {f"chain-2#{number}": f"tenant-{1 + number % 3}" for number in range(6)}
    assert Counter(record.tenant for record in result.records) == dict.fromkeys(set(tenants.values()), 4)


@pytest.mark.parametrize("policy", SCHEDULED)
def test_programs_that_state_no_ids_are_played_as_well(policy: str) -> None:
    result = play(policy, GENERATED, 400_000, states_ids=False)
    assert len(result.records) == sum(len(program.turns) for program in GENERATED.programs)
    assert {record.outcome for record in result.records} == {Outcome.COMPLETED}


def test_recognised_programs_are_served_nearly_as_well_as_stated_ones() -> None:
    stated, recognised = (
        play("ewsjf", GENERATED, 400_000, states_ids=states_ids) for states_ids in (True, False)
    )
    assert recognised.prefill_tokens < 1.5 * stated.prefill_tokens


def test_requests_without_a_program_are_served_beside_programs() -> None:
    others = mixed_requests(30, rate_per_s=2.0, seed=3)
    settings = ProgramSettings(policy="ewsjf", fleet=fleet(), concurrency=2)
    result = play_programs(settings, small_programs(3), others)
    assert len(result.records) == 30 + 3 * 6
    assert {f"r{number}" for number in range(30)} < {record.request_id for record in result.records}
    assert result.summary.completed == 3 * 6
    assert set(result.jct_s) == {0, 1, 2}


# Figures


@pytest.mark.parametrize("policy", ["ewsjf", "prefix-affinity", "direct"])
@pytest.mark.parametrize("profile", [PROFILE, "llama3-70b-h100-tp4", "qwen3-235b-a22b-h100-tp8"])
def test_a_program_alone_is_not_slowed_down(policy: str, profile: str) -> None:
    made = programs(chain(12, output=70), with_agents())
    result = play(policy, made, concurrency=1, fleet=fleet(replicas=1, profile=profile))
    assert list(result.slowdown.values()) == pytest.approx([1.0, 1.0], rel=0.03)


@pytest.mark.parametrize("policy", ["ewsjf", "prefix-affinity", "direct"])
def test_nothing_is_computed_twice_with_a_large_cache(policy: str) -> None:
    # Prompts and answers end inside a block: the last token of an answer is never cached.
    made = programs(*(chain(8, output=70) for _ in range(3)), with_agents())
    result = play(policy, made, concurrency=1, fleet=fleet(replicas=1))
    assert result.ideal_prefill_tokens == sum(sum(one.ideal_prefills()) for one in made.programs)
    # An engine's blocks are smaller, so it finds up to three more of them.
    turns = sum(len(one.turns) for one in made.programs)
    assert 0 <= result.ideal_prefill_tokens - result.prefill_tokens < turns * BLOCK_TOKENS
    assert result.as_json()["hit_ratio"] == 1 - result.prefill_tokens / result.prompt_tokens


def test_generated_programs_compute_the_ideal_prefill_with_a_large_cache() -> None:
    result = play("ewsjf", GENERATED, 20_000_000, fleet=fleet(20_000_000, replicas=1))
    assert result.prefill_tokens == pytest.approx(result.ideal_prefill_tokens, rel=0.002)


def test_the_figures_count_from_the_start_of_a_program_to_the_end_of_its_last_turn() -> None:
    made = small_programs(4)
    result = play("direct", made, concurrency=4)
    ended = {int(name.split("#")[1]): end for name, end in _ends(result).items()}
    assert result.jct_s == {number: pytest.approx(end - number) for number, end in ended.items()}
    (alone_s, *_) = alone_times(made, fleet().plans()[0])
    assert result.slowdown == {number: one / alone_s for number, one in result.jct_s.items()}
    assert result.prompt_tokens == 4 * sum(one.prompt_tokens for one in made.programs[0].turns)
    document = result.as_json()
    assert document["completed"] == 4
    assert {"mean", "p50", "p90", "p99"} <= set(document["jct_s"])  # type: ignore[call-overload]


def _ends(result: ProgramResult) -> dict[str, float]:
    return {
        name: record.finished_at for (name, index), record in by_turn(result.records).items() if index == 5
    }


def test_programs_that_fit_no_engine_are_dropped_and_counted() -> None:
    made = programs(chain(2), Program("large", (turn(9_000),)))
    result = play("direct", made, fleet=fleet(8_000))
    assert (len(result.records), result.programs.dropped) == (2, 1)
    with pytest.raises(TraceError, match="1 exceed the limit on tokens"):
        play("direct", programs(made.programs[1]), fleet=fleet(8_000))


# Settings


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"no policy 'best' for programs: choose one of direct, prefix-affinity, .*ewsjf"
    ):
        ProgramSettings(policy="best", fleet=fleet())


def test_each_policy_occurs_once() -> None:
    assert len(set(PROGRAM_POLICIES)) == len(PROGRAM_POLICIES)
    assert {*SCHEDULED, "direct"} <= set(PROGRAM_POLICIES)
    assert "oracle" not in PROGRAM_POLICIES


@pytest.mark.parametrize("field", ["concurrency", "tenants"])
def test_at_least_one_program_and_tenant_are_needed(field: str) -> None:
    with pytest.raises((SettingsError, ValueError), match=field):
        ProgramSettings(policy="ewsjf", fleet=fleet(), **{field: 0})  # type: ignore[arg-type]


def test_a_label_names_the_result() -> None:
    settings = ProgramSettings(policy="ewsjf", fleet=fleet(), label="ours")
    assert settings.name == "ours"
    assert ProgramSettings(policy="ewsjf", fleet=fleet()).name == "ewsjf"


def test_settings_of_the_scheduler_are_applied() -> None:
    with_programs = play("ewsjf", GENERATED, 400_000)
    without = play("ewsjf", GENERATED, 400_000, scheduler={"programs.enabled": False})
    by_affinity = play("prefix-affinity", GENERATED, 400_000)
    assert without.records == by_affinity.records
    assert with_programs.records != by_affinity.records


def report_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "serve_app.lab.simulation.programs.SimulationSettings",
        lambda **values: SimulationSettings(**(values | {"reports_when_idle": True})),
    )


def test_a_program_that_starts_before_the_first_report_waits_for_that_report_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report_when_idle(monkeypatch)
    made = programs(chain(2, first=19_200))
    result = play("ewsjf", made, fleet=fleet(400_000))
    assert result.max_wait_s == pytest.approx(LATENCY_S)


@pytest.mark.parametrize("made", [small_programs(4), GENERATED], ids=["short", "generated"])
def test_reports_without_requests_in_progress_make_little_difference(
    made: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ProgramSettings(policy="ewsjf", fleet=fleet(400_000), concurrency=2)
    few = play_programs(settings, made)
    report_when_idle(monkeypatch)
    all_reports = play_programs(settings, made)
    assert few.jct_s == pytest.approx(all_reports.jct_s, rel=0.02)
    assert few.prefill_tokens == pytest.approx(all_reports.prefill_tokens, rel=0.05)


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
