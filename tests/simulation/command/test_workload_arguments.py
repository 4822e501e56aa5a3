import argparse
from pathlib import Path

import pytest

from serve_app.simulation.command.workload_arguments import (
    configure_replicas,
    configure_trace,
    configure_workload,
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
    assert parsed("--trace", "x", "--pools", "long:1,short:3").pools == {"short": 3, "long": 1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trace x --pools short:3", "write short:N,long:M with at least one of each, got 'short:3'"),
        ("--trace x --pools short:0,long:1", "with at least one of each"),
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
