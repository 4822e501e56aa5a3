"""Oracle that serves a batch beside interactive requests."""

from functools import partial

import numpy as np
import pytest

from experiments.batch.oracle import OracleSimulation
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import Distribution
from serve_app.lab.simulation.run import (
    ONE_POOL,
    Disclosure,
    FleetSettings,
    choose_trace,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.workloads import TraceChoice, scale_to_rate

FLEET = FleetSettings(profile="llama2-70b-h100-tp4", replicas={ONE_POOL: 1})
UNTIL_S = 20.0


def lengths(rng: np.random.Generator) -> tuple[int, int]:
    """Return prompt and output tokens of prompts with a part of a block at their end."""
    return int(rng.integers(1, 2_000)), int(rng.integers(1, 60))


def play(slowdown: float) -> tuple[list[RequestRecord], OracleSimulation]:
    (plan,) = FLEET.plans(isolated=True)
    simulation = OracleSimulation(
        scheduler_settings("ewsjf", FLEET.routing, {}),
        plan,
        lengths=partial(lengths, np.random.default_rng(1)),
        slowdown=slowdown,
        until=UNTIL_S,
    )
    trace = scale_to_rate(choose_trace(TraceChoice(name="paper-mix", requests=60), 1), 3.0)
    return simulation.run(list(requests_of(trace, Disclosure(), plan.engine.block_size))), simulation


def mean_tpot_s(records: list[RequestRecord]) -> float:
    mean = Distribution.of(one.tpot_s for one in records if one.tpot_s is not None).mean
    assert mean is not None
    return mean


def test_a_batch_of_the_oracle_lengthens_iterations_by_its_share() -> None:
    alone, none = play(0.0)
    assert none.ended == []
    few, small = play(0.1)
    many, large = play(0.5)
    assert len(few) == len(many) == 60
    assert 1.0 < mean_tpot_s(few) / mean_tpot_s(alone) < 1.15
    assert sum(tokens for _, tokens in large.ended) > sum(tokens for _, tokens in small.ended) > 0


def test_every_prompt_of_the_batch_is_computed_once() -> None:
    _, simulation = play(0.2)
    (replica,) = simulation.replicas.values()
    rng = np.random.default_rng(1)
    batch = sum(lengths(rng)[0] for _ in simulation.ended)
    interactive = choose_trace(TraceChoice(name="paper-mix", requests=60), 1).requests
    prompts = batch + sum(one.prompt_tokens for one in interactive)
    # Beside whole prompts there are a few that were begun.
    assert replica.prefilled_tokens == pytest.approx(prompts, rel=0.1)
    assert replica.prefilled_tokens >= prompts
