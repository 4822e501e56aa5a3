"""Learned queues in simulated runs: from arrivals into the scheduler, and through files."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.policies.disturbances import LengthNoise
from serve_app.cli import main
from serve_app.core.decision_log import Decision
from serve_app.core.events import PartitionChanged
from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import FleetSettings, RunResult, RunSettings, TraceChoice, simulate
from serve_app.lab.simulation.simulation import (
    FixedPartition,
    partition_source,
    read_partition,
    write_partition,
)
from serve_app.tuning import LearnedPartitions, StrategicSettings

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
