import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import main
from serve_app.cli.application import ApplicationClient
from serve_app.cli.workload_arguments import (
    configure,
    fleet,
    fleet_of_running,
    trace_choice,
)
from serve_app.core.commands import Dispatch
from serve_app.core.decision_log import read_runs
from serve_app.lab.simulation.report import policies_table
from serve_app.lab.simulation.run import EngineChanges
from serve_app.lab.workloads import TraceChoice
from tests.cli.pages import answering

SMALL = ["--profile", "laptop", "--requests", "150", "--jobs", "1"]


def simulate(*arguments: str) -> int:
    fleet = [] if "--pools" in arguments else ["--replicas", "2"]
    return main(["simulate", "--trace", "paper-mix", *SMALL, *fleet, *arguments])


def run_of(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Return the only run of the JSON output."""
    out = tmp_path / "out.json"
    assert simulate(*arguments, "--json", str(out)) == 0
    (run,) = json.loads(out.read_text())["runs"]
    found: dict[str, Any] = run
    return found


def test_the_json_follows_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out.json"
    assert simulate("--policy", "direct,fcfs", "--load", "0.9", "--seeds", "2", "--json", str(out)) == 0
    document = json.loads(out.read_text())
    runs = document["runs"]
    assert [(run["policy"], run["seed"], run["load"]) for run in runs] == [
        ("direct", 0, 0.9),
        ("direct", 1, 0.9),
        ("fcfs", 0, 0.9),
        ("fcfs", 1, 0.9),
    ]
    for run in runs:
        metrics = run["metrics"]
        for name in ("completed", "throughput_tokens_per_s", "goodput_per_s", "makespan_s", "jain_tenants"):
            assert metrics[name] > 0, name
        assert metrics["preemptions"] >= 0
        for name in ("ttft_s", "tpot_s", "e2e_s", "queue_wait_s"):
            for size in ("all", "short", "long"):
                figures = metrics[name][size]
                assert set(figures) == {"mean", "p50", "p95", "p99", "max"}
                assert 0 <= figures["p50"] <= figures["p95"] <= figures["p99"] <= figures["max"]
        assert run["whole_run"]["completed"] == 150
    assert {"commit", "settings", "trace", "seeds"} <= set(document["provenance"])
    assert document["provenance"]["seeds"] == [0, 1]
    assert document["provenance"]["settings"]["load"] == 0.9
    table = capsys.readouterr().out
    assert "| direct " in table
    assert "| fcfs " in table


def test_short_is_up_to_256_tokens_by_default(tmp_path: Path) -> None:
    shares = []
    for extra in ([], ["--short-at", "64"]):
        run = run_of(tmp_path, "--policy", "direct", "--rate", "5", "--slo-tpot-s", "9", *extra)
        shares.append(run["metrics"]["ttft_s"]["long"]["mean"])
        assert run["settings"]["short_at_tokens"] == (64 if extra else 256)
    # More prompts count as long, and those are the fast ones.
    assert shares[1] < shares[0]


def test_the_same_command_writes_the_same_log_to_the_byte(tmp_path: Path) -> None:
    logs = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for log in logs:
        assert simulate("--policy", "fcfs", "--load", "1.1", "--seeds", "2", "--log", str(log)) == 0
    first, second = (log.read_bytes() for log in logs)
    assert first == second
    runs = list(read_runs(first.decode().splitlines()))
    assert [run.header.run["seed"] for run in runs] == [0, 1]
    for run in runs:
        commands = [command for _, decision in run.decisions for command in decision.commands]
        sent = [command.request_id for command in commands if isinstance(command, Dispatch)]
        assert sorted(sent) == sorted(f"r{number}" for number in range(150))


def test_a_rate_is_shown_with_the_load_that_it_means(tmp_path: Path) -> None:
    loads = []
    for rate in ("20", "40"):
        run = run_of(tmp_path, "--policy", "direct", "--rate", rate)
        assert run["rate_per_s"] == pytest.approx(float(rate))
        loads.append(run["load"])
    assert loads[1] == pytest.approx(2 * loads[0])


def test_two_pools_are_named_with_their_sizes(tmp_path: Path) -> None:
    run = run_of(tmp_path, "--pools", "short:2,long:1", "--b-short", "2000", "--policy", "fcfs")
    engines = [(one["replica"], one["max_model_len"]) for one in run["settings"]["engines"]]
    assert engines == [("short-1", 2_000), ("short-2", 2_000), ("long-1", 8_192)]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (
            ("--load", "0.5", "--max-model-len", "2000"),
            ("exceed all context limits and were excluded",),
        ),
        (("--load", "3", "--queue-timeout-s", "0.2"), ("unequal work: fcfs, seed 0: only", "expired")),
    ],
)
def test_omissions_and_unequal_work_are_reported(
    arguments: tuple[str, ...], messages: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    simulate("--policy", "fcfs", *arguments)
    errors = capsys.readouterr().err
    assert all(message in errors for message in messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "lifo"], "no policy 'lifo'"),
        (["--profile", "abacus"], "no engine profile 'abacus'"),
        (["--set", "backpressure.target_waiting"], "--set must be PATH=VALUE"),
        (["--arrivals", "tides"], "unknown arrivals 'tides'"),
        (["--first-seed", "-1"], "--first-seed must not be negative"),
        (["--warm-up", "1.5"], "warm_up_ratio"),
        (["--set", "foo.bar=1"], "simulate: foo.bar: unknown key"),
        (["--set", "backpressure.target_wating=5"], "did you mean backpressure.target_waiting?"),
        (
            ["--set", "target_waiting=5"],
            "target_waiting: unknown key; did you mean backpressure.target_waiting?",
        ),
        (
            ["--set", "backpressure.target_waiting=many"],
            "simulate: backpressure.target_waiting must be a whole number, got 'many'",
        ),
        (["--set", "backpressure.target_waiting=-1"], "simulate: backpressure.target_waiting must "),
    ],
)
def test_impossible_arguments_end_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate("--policy", "fcfs", "--rate", "5", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert "pydantic" not in line


def row(policy: str, seed: int, mean: float, *, deployable: bool = True) -> dict[str, object]:
    times = {"mean": mean, "p99": 2 * mean, "max": 3 * mean}
    by_size = {"all": times, "short": times, "long": times}
    return {
        "policy": policy,
        "seed": seed,
        "deployable": deployable,
        "metrics": {"ttft_s": by_size, "queue_wait_s": by_size, "tpot_s": by_size, "goodput_per_s": 1.0},
        "whole_run": {"throughput_tokens_per_s": 1_000.0},
    }


def test_a_table_has_means_and_intervals_over_seeds() -> None:
    rows = [row("fcfs", seed, mean) for seed, mean in enumerate((1.0, 2.0, 3.0))]
    line = next(line for line in policies_table(rows).splitlines() if "fcfs" in line)
    # Student's t with two degrees of freedom: 4.303 * 1 / sqrt(3).
    assert "2.000 ± 2.484" in line
    assert "|     3 |" in line


def test_a_single_seed_has_no_interval_and_the_oracle_is_marked() -> None:
    table = policies_table([row("fcfs", 0, 1.0), row("oracle", 0, 0.5, deployable=False)])
    assert "±" not in table
    assert "oracle (not deployable)" in table


def test_an_advanced_setting_may_be_given_as_files_write_it(tmp_path: Path) -> None:
    weights = []
    for path in ("ewsjf.weights.b_u", "advanced.ewsjf.weights.b_u"):
        run = run_of(tmp_path, "--policy", "ewsjf", "--rate", "5", "--set", f"{path}=0.5")
        weights.append(run["metrics"])
    assert weights[0] == weights[1]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args(words)


def test_the_trace_is_chosen_by_the_arguments() -> None:
    assert trace_choice(parsed("--trace", "lmsys")) == TraceChoice(name="lmsys")
    words = (
        "--trace a.csv --requests 7 --tenants 8:1.2 --priorities batch=1 --arrivals poisson --traces-folder d"
    )
    assert trace_choice(parsed(*words.split())) == TraceChoice(
        name="a.csv",
        requests=7,
        tenants="8:1.2",
        priorities="batch=1",
        arrivals="poisson",
        folder=Path("d"),
    )


def test_replicas_are_in_one_pool_or_in_two() -> None:
    assert (parsed("--trace", "x").replicas, parsed("--trace", "x").pools) == (4, None)
    two = fleet(parsed("--trace", "x", "--pools", "long:1,short:3"))
    assert list(two.replicas.items()) == [("short", 3), ("long", 1)]
    assert (two.b_short_tokens, two.by_pool) == (8_192, {})
    assert fleet(parsed("--trace", "x")).replicas == {"all": 4}


def test_pools_may_have_contexts_and_profiles_of_their_own() -> None:
    words = ("--trace", "x", "--pools", "small:4:2048,middle:2:8192:laptop,large:1::llama2-70b-h100-tp4")
    three = fleet(parsed(*words))
    assert three.replicas == {"small": 4, "middle": 2, "large": 1}
    assert three.b_short_tokens == 2_048
    assert [three.profile_of(pool) for pool in ("middle", "large")] == ["laptop", "llama2-70b-h100-tp4"]
    assert [three.by_pool[pool].engine.max_model_len for pool in three.replicas] == [2_048, 8_192, None]
    assert fleet(parsed(*words, "--b-short", "1024")).b_short_tokens == 1_024
    assert fleet(parsed("--trace", "x", "--pools", "a:1:16384,b:1")).b_short_tokens == 8_192
    assert fleet(parsed("--trace", "x", "--pools", "a:1:4096,b:1")).b_short_tokens == 4_096


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trace x --pools short", "must be NAME:N or NAME:N:CONTEXT, got 'short'"),
        ("--trace x --pools short:3:many", "must be NAME:N or NAME:N:CONTEXT, got 'short:3:many'"),
        ("--trace x --pools short:0,long:1", "must be at least 1, got 'short:0'"),
        ("--trace x --pools a:1,a:2", "a unique name, got 'a:1,a:2'"),
        ("--trace x --pools :1", "each pool needs a unique name"),
        ("--trace x --pools short:1,long:1 --replicas 2", "not allowed with argument"),
        ("--trace x --load 0.9 --rate 3", "not allowed with argument"),
        ("--load 0.9", "required: --trace"),
    ],
)
def test_arguments_that_contradict_one_another_are_rejected(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*words.split())
    assert message in capsys.readouterr().err


@pytest.fixture
def captured(tmp_path: Path) -> Path:
    """Return a trace file as `capture` writes it."""
    path = tmp_path / "captured.jsonl"
    lines = ({"timestamp": 50 * n, "input_length": 90, "output_length": 9, "hash_ids": []} for n in range(40))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


PLAY = ["--policy", "fcfs", "--jobs", "1"]


def test_equal_runs_of_several_seeds_have_no_interval(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["simulate", "--trace", str(captured), "--profile", "laptop", "--seeds", "3", *PLAY])
    printed = capsys.readouterr()
    assert status == 0
    assert "± 0" not in printed.out
    assert "all seeds gave the same run of fcfs" in printed.err


def test_recorded_traffic_on_engines_that_nobody_has_chosen_is_noted(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = ["simulate", "--trace", str(captured), *PLAY]
    assert main(played) == 0
    assert "not those that served" in (noted := capsys.readouterr().err)
    assert "profile llama2-70b-h100-tp4" in noted
    assert main([*played, "--profile", "laptop"]) == 0
    assert "not those that served" not in capsys.readouterr().err


STEP_TIMES = {
    "latency_s": 0.003,
    "decode_base_s": 0.5,
    "decode_per_sequence_s": 0.0,
    "prefill_base_s": 0.25,
    "prefill_per_token_s": 0.0,
}
REPLICA = {"pool": "short", "kv_tokens": 50_000, "max_model_len": 4_000, "max_num_seqs": 8}


def running(**changes: Any) -> dict[str, Any]:
    """Return the status of an application whose tuner has fitted its engines."""
    model = {
        "model": "m",
        "pools": ["short"],
        "replicas": {name: {**REPLICA, "max_num_batched_tokens": None} for name in ("s1", "s2")},
        "tuner": {"twin": {"engines": {"short": STEP_TIMES}}},
    }
    return {"models": [model | changes]}


def test_engines_are_simulated_as_the_running_ones(captured: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with answering(lambda _method, path, _headers: (200, running())) as url:
        address = ["--like-running", "--url", url, "--api-key", "secret"]
        assert main(["simulate", "--trace", str(captured), *PLAY, *address, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    # Nine tokens take a prefill and eight steps.
    assert document["runs"][0]["metrics"]["tpot_s"]["all"]["p50"] == pytest.approx(0.5)
    assert document["runs"][0]["metrics"]["ttft_s"]["all"]["p50"] > 0.25
    assert "secret" not in out.read_text()


def test_running_engines_keep_the_limits_that_they_report() -> None:
    of_pool = {
        "short": {**REPLICA, "max_model_len": 20_000, "long_prefill_token_threshold": 128},
        "long": {**REPLICA, "max_model_len": 30_000, "pool": "long", "long_prefill_token_threshold": None},
    }
    replicas = {name: {**replica, "max_num_batched_tokens": None} for name, replica in of_pool.items()}
    fitted = {"twin": {"engines": dict.fromkeys(of_pool, STEP_TIMES)}}
    status = running(pools=list(of_pool), replicas=replicas, tuner=fitted)
    with answering(lambda _method, path, _headers: (200, status)) as url:
        args = argparse.Namespace(url=url, api_key="secret")
        short, long = fleet_of_running(ApplicationClient(args), EngineChanges()).plans()
        given = fleet_of_running(ApplicationClient(args), EngineChanges(long_prefill_token_threshold=64))
    # The context of the short pool is not cut at the boundary of 8,192 tokens.
    assert (short.engine.max_model_len, long.engine.max_model_len) == (20_000, 30_000)
    assert (short.engine.long_prefill_token_threshold, long.engine.long_prefill_token_threshold) == (128, 0)
    assert [plan.engine.long_prefill_token_threshold for plan in given.plans()] == [64, 64]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tuner": None}, "the step times of pool short of model m are not known"),
        ({"replicas": {}}, "has no replica"),
        (
            {"replicas": {"s1": {**REPLICA, "kv_tokens": None, "max_num_batched_tokens": None}}},
            "do not report kv_tokens: pass --kv-tokens",
        ),
    ],
)
def test_running_engines_of_which_something_is_unknown_are_rejected(
    changes: dict[str, Any], says: str, captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(lambda _method, path, _headers: (200, running(**changes))) as url:
        assert main(["simulate", "--trace", str(captured), *PLAY, "--like-running", "--url", url]) == 2
    assert says in capsys.readouterr().err
