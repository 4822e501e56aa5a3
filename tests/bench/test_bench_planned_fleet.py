"""The script that serves a planned fleet: what it serves, and what it makes of what it saw."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from serve_app.errors import Outcome
from serve_app.metrics.slo import Slo
from serve_app.planning.sizing.fleets import PoolPlan, split_fleet
from serve_app.planning.sizing.verification import PoolFigures, RunFigures, Verification, Workload
from serve_app.settings.loading import settings_of
from serve_app.simulation.fleet import EngineChanges
from serve_app.simulation.workload import TraceChoice
from tests.metrics.builders import record

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PROFILE = "llama2-70b-h100-tp4"
PLAN = split_fleet(
    PoolPlan(profile=PROFILE, engine=EngineChanges(max_num_seqs=128)), PoolPlan(profile=PROFILE), 2_048
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_planned_fleet")


def run_figures(seed: int, ttft_s: float) -> RunFigures:
    return RunFigures(
        seed=seed,
        requests=100,
        lost=0,
        preemptions=2,
        p99_ttft_s=ttft_s,
        p99_tpot_s=0.05,
        long_p99_ttft_s=ttft_s,
        by_pool={"short": PoolFigures(1.0, 1.0, ttft_s, 0.04)},
    )


def verification() -> Verification:
    demand = Workload(trace=TraceChoice(name="azure-conv"), rate_per_s=4.0, slo=Slo(ttft_s=2.0, tpot_s=0.08))
    return Verification(PLAN, {"short": 2, "long": 3}, demand, (run_figures(0, 1.0), run_figures(1, 3.0)))


def test_the_application_has_the_planned_pools_and_nothing_else(script: ModuleType) -> None:
    fleet = SimpleNamespace(plan=PLAN, counts={"short": 2, "long": 3}, verification=verification())
    (application,) = script.application(fleet)["applications"]
    (model,) = settings_of(application["args"]).models
    short, long = model.pools
    assert (short.name, short.replicas, long.name, long.replicas) == ("short", 2, "long", 3)
    assert short.autoscaling is None
    assert short.engine.emulated is not None
    assert long.engine.emulated is not None
    assert (short.engine.emulated.max_model_len, short.engine.emulated.max_num_seqs) == (2_048, 128)
    assert long.engine.emulated.max_num_seqs == 256
    # Both with the chunk limit that the plan's simulation has.
    assert short.engine.emulated.long_prefill_token_threshold > 0
    assert model.scheduler.policy == "ewsjf"
    assert model.scheduler.routing.b_short_tokens == 2_048


def test_tails_are_of_what_completed_by_the_pool_that_served(script: ModuleType) -> None:
    records = [
        record(arrived_at=0.0, first_token_at=1.0, finished_at=2.0, pool="short"),
        record(arrived_at=0.0, first_token_at=3.0, finished_at=4.0, pool="long"),
        record(arrived_at=0.0, finished_at=9.0, outcome=Outcome.FAILED, pool="long"),
    ]
    tails = script.tails(records, lambda one: one.ttft_s)
    assert tails == pytest.approx({"all": 2.98, "long": 3.0, "short": 1.0})


def test_the_table_sets_planned_simulated_and_observed_side_by_side(script: ModuleType) -> None:
    live = [
        script.LiveRun(
            seed=seed,
            requests=100,
            lost=1,
            late=0,
            within=0.99,
            p99_ttft_s={"all": 1.5, "short": 1.0},
            p99_tpot_s={"all": 0.06, "short": 0.05},
            cores={"gateway": 0.1},
            load_average=None,
        )
        for seed in range(2)
    ]
    plan = verification()
    lines = script.table(plan, plan.runs[:1], live).splitlines()
    assert lines[2] == "| TTFT s | all | 2 | 1 | 1.5 +- 0 | 2 |"
    # Nobody went long, so there is no tail, rather than one of zero.
    assert lines[4] == "| TTFT s | long | - | - | - | - |"
    assert lines[5] == "| TPOT ms | all | 50 | 50 | 60 +- 0 | 80 |"
    said = script.circumstances(plan, plan.runs[:1], live)
    assert "lost: 2 of 200 live" in said
    assert "cores: gateway 0.10" in said
