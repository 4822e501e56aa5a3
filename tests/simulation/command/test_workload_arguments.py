import argparse
from pathlib import Path

import pytest

from serve_app.simulation.command.workload_arguments import (
    configure_replicas,
    configure_trace,
    configure_workload,
    fleet_of,
    trace_choice,
)
from serve_app.simulation.workload import TraceChoice


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure_workload(parser.add_argument_group(), requests=50, requests_help="")
    configure_replicas(parser.add_argument_group(), b_short_help="")
    return parser.parse_args(words)


def test_the_trace_is_chosen_by_the_arguments() -> None:
    assert trace_choice(parsed("--trace", "lmsys")) == TraceChoice(name="lmsys", requests=50)
    words = (
        "--trace a.csv --requests 7 --tenants 8:1.2 --priorities batch=1 --arrivals poisson --traces-folder d"
    )
    assert trace_choice(parsed(*words.split()), flip_mix_at=256) == TraceChoice(
        name="a.csv",
        requests=7,
        tenants="8:1.2",
        priorities="batch=1",
        arrivals="poisson",
        folder=Path("d"),
        flip_mix_at=256,
    )


def test_arrivals_may_have_another_default() -> None:
    parser = argparse.ArgumentParser()
    configure_trace(parser.add_argument_group(), arrivals="poisson", arrivals_help="")
    assert parser.parse_args(["--trace", "lmsys"]).arrivals == "poisson"


def test_replicas_are_in_one_pool_or_in_two() -> None:
    assert (parsed("--trace", "x").replicas, parsed("--trace", "x").pools) == (4, None)
    two = fleet_of(parsed("--trace", "x", "--pools", "long:1,short:3"))
    assert list(two.replicas.items()) == [("short", 3), ("long", 1)]
    assert (two.b_short_tokens, two.by_pool) == (8_192, {})
    assert fleet_of(parsed("--trace", "x")).replicas == {"all": 4}


def test_pools_may_have_contexts_and_profiles_of_their_own() -> None:
    words = ("--trace", "x", "--pools", "small:4:2048,middle:2:8192:laptop,large:1::llama2-70b-h100-tp4")
    three = fleet_of(parsed(*words))
    assert three.replicas == {"small": 4, "middle": 2, "large": 1}
    assert three.b_short_tokens == 2_048
    assert [three.profile_of(pool) for pool in ("middle", "large")] == ["laptop", "llama2-70b-h100-tp4"]
    assert [three.by_pool[pool].engine.max_model_len for pool in three.replicas] == [2_048, 8_192, None]
    assert fleet_of(parsed(*words, "--b-short", "1024")).b_short_tokens == 1_024
    assert fleet_of(parsed("--trace", "x", "--pools", "a:1:16384,b:1")).b_short_tokens == 8_192
    assert fleet_of(parsed("--trace", "x", "--pools", "a:1:4096,b:1")).b_short_tokens == 4_096


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trace x --pools short", "write NAME:N or NAME:N:CONTEXT, got 'short'"),
        ("--trace x --pools short:3:many", "write NAME:N or NAME:N:CONTEXT, got 'short:3:many'"),
        ("--trace x --pools short:0,long:1", "at least one replica and token, got 'short:0'"),
        ("--trace x --pools a:1,a:2", "a name of its own, got 'a:1,a:2'"),
        ("--trace x --pools short:1,long:1 --replicas 2", "not allowed with argument"),
        ("--trace x --load 0.9 --rate 3", "not allowed with argument"),
        ("--load 0.9", "required: --trace"),
    ],
)
def test_arguments_that_contradict_one_another_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*words.split())
    assert message in capsys.readouterr().err
