"""The simulation, its timeline, and learned queues in simulated runs."""

import itertools
import json
import pickle
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from experiments.policies.grid import LengthNoise
from serve_app.cli import main
from serve_app.core import SchedulerSettings
from serve_app.core.commands import Conclude
from serve_app.core.decision_log import Decision
from serve_app.core.events import Finished, PartitionChanged
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.core.routing.pools import RoutingSettings
from serve_app.errors import Outcome, SettingsError
from serve_app.lab.simulation.run import FleetSettings, RunResult, RunSettings, simulate
from serve_app.lab.simulation.simulation import (
    FixedPartition,
    Phase,
    SimulatedRequest,
    Simulation,
    SimulationSettings,
    Timeline,
    partition_source,
    read_partition,
    write_partition,
)
from serve_app.lab.workloads import TraceChoice
from serve_app.request import TurnEnd
from serve_app.tuning import LearnedPartitions, StrategicSettings
from tests.lab.simulation.builders import mixed_requests, plan, simulated

SCHEDULER = SchedulerSettings(model="m", routing=RoutingSettings(b_short_tokens=500))


def simulation(log: list[Decision] | None = None, **changes: Any) -> Simulation:
    plans = [
        plan("s1", "short", max_model_len=1_000, kv_tokens=4_000),
        plan("l1", "long", max_model_len=4_000, kv_tokens=8_000),
    ]
    on_decision = None if log is None else log.append
    return Simulation(SCHEDULER, plans, settings=SimulationSettings(**changes), on_decision=on_decision)


def test_dispatches_and_feedback_take_the_control_latency() -> None:
    log: list[Decision] = []
    (record,) = simulation(log, control_latency_s=0.5).run(mixed_requests(1, rate_per_s=1.0, seed=5))
    assert record.dispatched_at == record.arrived_at
    # The grant travels to the engine before the first step can begin.
    assert record.ttft_s is not None
    assert record.ttft_s > 0.5
    (end,) = (step for step in log if any(isinstance(command, Conclude) for command in step.commands))
    assert end.now == pytest.approx(record.finished_at + 0.5)


def test_overload_expires_or_rejects_requests_instead_of_losing_them() -> None:
    requests = mixed_requests(200, rate_per_s=200.0, seed=6, timeout_s=2.0)
    records = simulation().run(requests)
    outcomes = [record.outcome for record in records]
    assert len(outcomes) == 200
    # Requests of the first two seconds expire; then the scheduler predicts that others would, too.
    assert set(outcomes) == {Outcome.COMPLETED, Outcome.EXPIRED, Outcome.REJECTED_DEADLINE_UNMEETABLE}
    for record in records:
        if record.outcome is Outcome.EXPIRED:
            assert record.e2e_s == pytest.approx(2.0, abs=1e-6)
        if record.outcome is Outcome.REJECTED_DEADLINE_UNMEETABLE:
            assert record.e2e_s == 0.0


def test_each_end_is_reported_once_with_its_record() -> None:
    ended: list[tuple[SimulatedRequest, RequestRecord]] = []
    made = simulation()
    made.on_end = lambda simulated, record: ended.append((simulated, record))
    # Some of them expire in the queue.
    records = made.run(mixed_requests(150, rate_per_s=100.0, seed=6, timeout_s=2.0))
    assert [record for _, record in ended] == records
    assert [one.request.request_id for one, _ in ended] == [record.request_id for record in records]
    assert len({record.outcome for record in records}) > 1


def test_a_request_submitted_at_the_end_of_another_is_served() -> None:
    made = simulation()

    def follow(ended: SimulatedRequest, record: RequestRecord) -> None:
        if len(made.records) < 5:
            number = len(made.records)
            made.submit(simulated(f"r{number}", at=made.timeline.now + 20.0))

    made.on_end = follow
    records = made.run([simulated("r0")])
    assert [record.request_id for record in records] == [f"r{number}" for number in range(5)]
    for before, record in itertools.pairwise(records):
        assert record.arrived_at == pytest.approx(before.finished_at + 0.001 + 20.0)
        assert record.dispatched_at == record.arrived_at
    assert made.is_over
    assert len(made.timeline) <= len(made.replicas)


def test_the_scheduler_is_informed_of_the_ending_of_an_answer() -> None:
    log: list[Decision] = []
    endings = [TurnEnd.TOOLS, TurnEnd.DONE, None]
    simulation(log).run(
        [simulated(f"r{number}", at=5.0 * number, ending=ending) for number, ending in enumerate(endings)]
    )
    finished = [step.event for step in log if isinstance(step.event, Finished)]
    assert [event.usage.ending for event in finished if event.usage is not None] == endings


def test_prefilled_tokens_count_what_the_prefix_cache_lacks() -> None:
    made = simulation()
    blocks = tuple(range(20))
    made.run(
        [
            simulated("first", prompt_tokens=165, output_tokens=20, blocks=blocks[:11]),
            simulated("next", prompt_tokens=250, blocks=blocks[:15], at=5.0),
            simulated("large", prompt_tokens=900, at=10.0),
        ]
    )
    # 184 tokens of the first were computed: its prompt, and its answer except for the last token.
    prefilled = {name: replica.prefilled_tokens for name, replica in made.replicas.items()}
    assert prefilled == {"s1": 165 + 250 - 11 * 16, "l1": 900}


def test_prefilled_tokens_count_those_of_preempted_sequences_again() -> None:
    made = Simulation(SCHEDULER, [plan("s1", "short", kv_tokens=2_000), plan("l1", "long", kv_tokens=2_000)])
    (s1, l1) = made.replicas.values()
    requests = [
        simulated(f"r{number}", prompt_tokens=400, output_tokens=900, bound_to="s1") for number in range(3)
    ]
    records = made.run(requests)
    assert sum(record.preemptions for record in records) > 0
    assert s1.prefilled_tokens > 3 * 400
    assert l1.prefilled_tokens == 0


# -- timeline ---------------------------------------------------------------------------------------------


def test_things_happen_by_time_then_rank_then_the_order_of_planning() -> None:
    timeline = Timeline()
    seen: list[str] = []
    for time, phase, name in [
        (2.0, Phase.ENGINE, "late"),
        (1.0, Phase.ARRIVAL, "arrival"),
        (1.0, Phase.FEEDBACK, "feedback 1"),
        (1.0, Phase.FEEDBACK, "feedback 2"),
        (1.0, Phase.ENGINE, "engine"),
    ]:
        timeline.schedule(time, phase, lambda name=name: seen.append(name))  # type: ignore[misc]
    timeline.run()
    assert seen == ["engine", "feedback 1", "feedback 2", "arrival", "late"]
    assert timeline.now == 2.0


def test_the_past_cannot_be_scheduled() -> None:
    timeline = Timeline()
    timeline.schedule(1.0, Phase.FEEDBACK, lambda: None)
    timeline.run()
    with pytest.raises(ValueError, match=r"cannot schedule an event at 0\.5: the time is already 1\.0"):
        timeline.schedule(0.5, Phase.FEEDBACK, lambda: None)
    with pytest.raises(ValueError, match=r"cannot schedule an event at 0\.5: the time is already 1\.0"):
        timeline.schedule_all(Phase.ARRIVAL, [(2.0, lambda: None), (0.5, lambda: None)])


def test_actions_scheduled_together_run_as_if_scheduled_one_by_one() -> None:
    rng = random.Random(3)
    times = [rng.choice([0.0, 1.0, 1.0, 2.0, 3.0]) for _ in range(60)]

    def run_order(*, at_once: bool) -> list[tuple[float, int]]:
        timeline, seen = Timeline(), list[tuple[float, int]]()
        actions = [(time, partial(_note, timeline, seen, number)) for number, time in enumerate(times)]
        for part, phase in ((actions[:20], Phase.REPORT), (actions[20:40], Phase.ARRIVAL)):
            if at_once:
                timeline.schedule_all(phase, part)
            else:
                for time, action in part:
                    timeline.schedule(time, phase, action)
        for number, (time, action) in enumerate(actions[40:]):
            timeline.schedule(time, list(Phase)[number % len(Phase)], action)
        assert len(timeline) == len(times)
        timeline.run()
        assert not len(timeline)
        return seen

    assert run_order(at_once=True) == run_order(at_once=False)
    assert len(run_order(at_once=True)) == len(times)


def _note(timeline: Timeline, seen: list[tuple[float, int]], number: int) -> None:
    seen.append((timeline.now, number))


# -- learned queues: from arrivals into the scheduler, and through files ----------------------------------

LEARNED = LearnedPartitions(StrategicSettings(window=100))
RUN = RunSettings(
    policy="ewsjf",
    fleet=FleetSettings(profile="laptop"),
    trace=TraceChoice(name="paper-mix", requests=300),
    rate_per_s=40.0,
    partition=LEARNED,
)
TWO = Partition(
    (
        LengthInterval(min_tokens=1, max_tokens=600, mean_tokens=140.5, count=3),
        LengthInterval(min_tokens=601, max_tokens=9000, mean_tokens=2500.0, count=7),
    )
)


def decided(run: RunSettings) -> tuple[RunResult, list[Decision]]:
    log: list[Decision] = []
    return simulate(run, log.append), log


def changes(log: list[Decision]) -> list[tuple[float, Partition]]:
    return [(step.now, step.event.partition) for step in log if isinstance(step.event, PartitionChanged)]


def test_queues_are_learned_from_the_first_arrivals_and_used_from_then_on() -> None:
    result, log = decided(RUN)
    assert changes(log) == list(result.partitions)
    ((at, partition),) = result.partitions
    assert at == result.records[99].arrived_at
    learned = {f"{queue.min_tokens}-{queue.max_tokens}" for queue in partition.intervals}
    before = {record.length_queue for record in result.records if (record.dispatched_at or 0.0) < at}
    after = {record.length_queue for record in result.records if (record.dispatched_at or 0.0) > at}
    assert not before & learned
    assert after & learned
    # Names other than learned queues are bubble queues: the prior is gone.
    assert all(name.startswith("~") for name in after - learned)


def test_the_learner_sees_the_lengths_that_the_scheduler_takes_them_for() -> None:
    exact, noisy = simulate(RUN), simulate(replace(RUN, estimator=LengthNoise(relative_error=0.5)))
    (_, of_exact), (_, of_noisy) = exact.partitions[0], noisy.partitions[0]
    longest = max(record.prompt_tokens for record in exact.records[:100])
    assert of_exact.intervals[-1].max_tokens == longest
    assert of_noisy.intervals[-1].max_tokens > longest


def test_the_same_inputs_give_the_same_decisions_to_the_byte() -> None:
    logs = [repr(decided(RUN)[1]).encode() for _ in range(2)]
    assert logs[0] == logs[1]


def test_a_run_with_a_learner_travels_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(RUN)) == RUN


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "ewsjf-released", "direct"])
def test_policies_without_learned_queues_have_none_to_learn(policy: str) -> None:
    assert simulate(replace(RUN, policy=policy)).partitions == ()


def test_a_given_partition_applies_from_the_beginning() -> None:
    result, log = decided(replace(RUN, partition=FixedPartition(TWO)))
    assert changes(log) == [(0.0, TWO)]
    assert {record.length_queue for record in result.records} == {"1-600", "601-9000"}


def test_a_partition_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "partition.yaml"
    write_partition(path, TWO)
    assert read_partition(path) == TWO
    assert partition_source(str(path), LEARNED) == FixedPartition(TWO)
    assert partition_source("learned", LEARNED) is LEARNED
    assert partition_source("prior", LEARNED) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "at least one interval"),
        ("[{min: 5, max: 3, mean: 4}]", "min <= mean <= max"),
        ("[{min: 1, max: 9, mean: 4}, {min: 5, max: 20, mean: 9}]", "sorted and must not overlap"),
        ("[{min: 1, max: 9, mean: 4, colour: red}]", "colour"),
        ("queues: 3", "list"),
        ("{", "is not a partition"),
    ],
)
def test_a_file_that_is_no_partition_is_rejected(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "partition.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_partition(path)


def test_a_partition_learned_by_one_command_can_be_used_by_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, out = tmp_path / "learned.yaml", tmp_path / "out.json"
    plain = ["simulate", "--trace", "paper-mix", "--profile", "laptop", "--replicas", "1", "--load", "0.8"]
    plain += ["--requests", "700", "--jobs", "1", "--json", str(out)]
    assert main([*plain, "--policy", "fcfs,ewsjf", "--save-partition", str(saved)]) == 0
    fcfs, ewsjf = json.loads(out.read_text())["runs"]
    assert fcfs["partitions"] == []
    assert ewsjf["partitions"][-1]["queues"][0]["min"] == read_partition(saved).intervals[0].min_tokens
    assert ewsjf["settings"]["partition"]["settings"]["window"] == 500
    assert f"{saved}: length queues of ewsjf, seed 0" in capsys.readouterr().out

    assert main([*plain, "--policy", "ewsjf", "--partition", str(saved)]) == 0
    (fixed,) = json.loads(out.read_text())["runs"]
    assert [change["at_s"] for change in fixed["partitions"]] == [0.0]

    assert main([*plain, "--policy", "ewsjf", "--partition", "prior", "--save-partition", str(saved)]) == 0
    assert "no run learned length queues" in capsys.readouterr().err
    assert main([*plain, "--policy", "ewsjf", "--partition", str(tmp_path / "none.yaml")]) == 2


def learned_queues(policy: str, folder: Path) -> int:
    """Return the number of queues that a simulated run of a policy has learned."""
    out = folder / f"{policy}.yaml"
    arguments = ["--trace", "paper-mix", "--requests", "1100", "--rate", "9", "--jobs", "1"]
    assert main(["simulate", *arguments, "--policy", policy, "--save-partition", str(out)]) == 0
    return len(read_partition(out))


@pytest.mark.slow
def test_the_published_policy_has_the_published_queues(tmp_path: Path) -> None:
    assert learned_queues("ewsjf-paper", tmp_path) > 2 * learned_queues("ewsjf", tmp_path)
