from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome, SettingsError
from serve_app.lab.simulation.fleet import ONE_POOL, EngineChanges, FleetSettings
from serve_app.lab.simulation.programs import (
    Fits,
    ProgramResult,
    ProgramRun,
    ProgramSettings,
    ToolPause,
    alone_times,
    play_programs,
    program_policies,
)
from serve_app.lab.simulation.simulation import SimulationSettings
from serve_app.lab.workloads.programs import BLOCK_TOKENS, Program, Programs, generate_programs
from serve_app.lab.workloads.trace import TraceError
from tests.lab.simulation.builders import mixed_requests, plan
from tests.lab.workloads.builders import chain, programs, turn

PROFILE = "llama31-8b-h100-tp1"
SCHEDULED = ("ewsjf", "prefix-affinity", "fcfs")
DIRECT = ("round-robin", "least-load", "session-hash", "kv-overlap", "tool-pause", "oracle")
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


@pytest.mark.parametrize("policy", [*SCHEDULED, *DIRECT])
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


@pytest.mark.parametrize("policy", ["ewsjf", "least-load", "tool-pause", "oracle"])
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
    result = play("least-load", small_programs(5), concurrency=3)
    records = by_turn(result.records)
    starts = [records[f"chain-6#{number}", 0].arrived_at for number in range(5)]
    ends = sorted(records[f"chain-6#{number}", 5].finished_at for number in range(5))
    assert starts == [0.0, 1.0, 2.0, *ends[:2]]


@pytest.mark.parametrize("policy", ["ewsjf", "kv-overlap", "tool-pause"])
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


@pytest.mark.parametrize("policy", ["ewsjf", "prefix-affinity", "least-load", "kv-overlap", "oracle"])
@pytest.mark.parametrize("profile", [PROFILE, "llama3-70b-h100-tp4", "qwen3-235b-a22b-h100-tp8"])
def test_a_program_alone_is_not_slowed_down(policy: str, profile: str) -> None:
    made = programs(chain(12, output=70), with_agents())
    result = play(policy, made, concurrency=1, fleet=fleet(replicas=1, profile=profile))
    assert list(result.slowdown.values()) == pytest.approx([1.0, 1.0], rel=0.03)


@pytest.mark.parametrize("policy", ["ewsjf", "prefix-affinity", "session-hash", "oracle"])
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


def test_a_small_cache_costs_more_prefill_without_the_oracle() -> None:
    made = small_programs(8, turns=10, first=3_200, added=640, gap_s=4.0)
    results = {
        policy: play(
            policy, made, 24_000, fleet=fleet(24_000, replicas=1, max_model_len=20_000), concurrency=8
        )
        for policy in ("least-load", "oracle", "tool-pause")
    }
    prefills = {policy: result.prefill_tokens for policy, result in results.items()}
    ideal = results["oracle"].ideal_prefill_tokens
    assert ideal <= prefills["oracle"] < 1.1 * ideal
    assert prefills["least-load"] > 2 * prefills["oracle"]
    assert prefills["oracle"] <= prefills["tool-pause"] < prefills["least-load"]


def test_the_figures_count_from_the_start_of_a_program_to_the_end_of_its_last_turn() -> None:
    made = small_programs(4)
    result = play("least-load", made, concurrency=4)
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


def test_the_longest_wait_is_from_the_arrival_of_a_turn_to_its_dispatch() -> None:
    made = small_programs(6, turns=3, first=6_400)
    result = play("oracle", made, concurrency=6, fleet=fleet(8_000, replicas=1))
    waits = [record.queue_wait_s for record in result.records]
    assert result.max_wait_s > 1.0
    assert result.max_wait_s == pytest.approx(max(one for one in waits if one is not None))


def test_programs_that_fit_no_engine_are_dropped_and_counted() -> None:
    made = programs(chain(2), Program("large", (turn(9_000),)))
    result = play("least-load", made, fleet=fleet(8_000))
    assert (len(result.records), result.programs.dropped) == (2, 1)
    with pytest.raises(TraceError, match="1 exceed the limit on tokens"):
        play("least-load", programs(made.programs[1]), fleet=fleet(8_000))


# Settings


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"no policy 'best' for programs: choose one of round-robin, .*ewsjf"
    ):
        ProgramSettings(policy="best", fleet=fleet())


def test_each_policy_occurs_once() -> None:
    policies = program_policies()
    assert len(set(policies)) == len(policies)
    assert {*SCHEDULED, *DIRECT} <= set(policies)


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


def test_the_working_set_has_the_last_context_of_each_conversation() -> None:
    run = ProgramRun(with_agents(), 0, "t", 0.0)
    assert run.tokens == 1_000
    run.on_start(0)
    assert run.tokens == 1_050
    run.on_start(1)
    run.on_start(2)
    assert run.tokens == 1_440 + 1_000
    run.on_start(3)
    assert run.tokens == 1_440 + 1_130
    assert run.largest_tokens == 2_060 + 1_130 + 720


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


# Gates


def started(number: int, prompt_tokens: int, output_tokens: int = 100, *, turns: int = 2) -> ProgramRun:
    """Return a program whose first turn was due at its number."""
    made = tuple(
        turn(prompt_tokens, output_tokens, after=(index - 1,) if index else ()) for index in range(turns)
    )
    return ProgramRun(Program(f"p{number}", made), number, "t", float(number))


def run_turn(run: ProgramRun, index: int, now: float) -> None:
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


def test_tool_pause_starts_programs_below_its_resume_threshold() -> None:
    # 85 % of 10,000 tokens: eight of 1,000 fit.
    gate = ToolPause([plan("a", "all", kv_tokens=10_000)])
    runs = [started(number, 1_000, 1) for number in range(9)]
    assert [gate.place(run, 0.0) for run in runs] == ["a"] * 8 + [None]


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
    assert gate._on == {"a": {run for run in runs if run is not runs[2]}}
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
    assert gate._on["a"] == set(runs)


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
    result = play("tool-pause", small_programs(6, turns=5), fleet=fleet(3_008, replicas=1))
    records = by_turn(result.records)
    for number in range(6):
        turns = [records[f"chain-5#{number}", index] for index in range(5)]
        assert all(one.finished_at <= other.arrived_at for one, other in pairwise(turns))
