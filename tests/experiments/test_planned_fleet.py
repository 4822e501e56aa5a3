"""The experiment that serves a planned fleet: what it serves, and what it makes of what it saw."""

from types import SimpleNamespace
from typing import cast

import pytest

from experiments.common.application import BUILD_APP, serve_config
from experiments.common.rows import Row
from experiments.planned_fleet.fleet import model
from experiments.planned_fleet.run import tails
from experiments.planned_fleet.tables import TABLES
from serve_app.errors import Outcome
from serve_app.metrics.slo import Slo
from serve_app.planning.sizing.candidates import SizedFleet
from serve_app.planning.sizing.fleets import PoolPlan, split_fleet
from serve_app.planning.sizing.verification import Verification, Workload
from serve_app.settings.loading import settings_of
from serve_app.simulation.fleet import EngineChanges
from serve_app.simulation.workload import TraceChoice
from tests.experiments.builders import row
from tests.metrics.builders import record

PROFILE = "llama2-70b-h100-tp4"
PLAN = split_fleet(
    PoolPlan(profile=PROFILE, engine=EngineChanges(max_num_seqs=128)), PoolPlan(profile=PROFILE), 2_048
)
COUNTS = {"short": 2, "long": 3}


def test_the_application_has_the_planned_pools_and_nothing_else() -> None:
    demand = Workload(trace=TraceChoice(name="azure-conv"), rate_per_s=4.0, slo=Slo(ttft_s=2.0, tpot_s=0.08))
    verification = Verification(PLAN, COUNTS, demand, ())
    fleet = cast("SizedFleet", SimpleNamespace(plan=PLAN, counts=COUNTS, verification=verification))
    (application,) = serve_config("planned", [model(fleet)], BUILD_APP, 8_000)["applications"]
    (served,) = settings_of(application["args"]).models
    short, long = served.pools
    assert (short.name, short.replicas, long.name, long.replicas) == ("short", 2, "long", 3)
    assert short.autoscaling is None
    assert short.engine.emulated is not None
    assert long.engine.emulated is not None
    assert (short.engine.emulated.max_model_len, short.engine.emulated.max_num_seqs) == (2_048, 128)
    assert long.engine.emulated.max_num_seqs == 256
    # Both with the chunk limit that the plan's simulation has.
    assert short.engine.emulated.long_prefill_token_threshold > 0
    assert served.scheduler.policy == "ewsjf"
    assert served.scheduler.routing.b_short_tokens == 2_048


def test_tails_are_of_what_completed_by_the_pool_that_served() -> None:
    records = [
        record(arrived_at=0.0, first_token_at=1.0, finished_at=2.0, pool="short"),
        record(arrived_at=0.0, first_token_at=3.0, finished_at=4.0, pool="long"),
        record(arrived_at=0.0, finished_at=9.0, outcome=Outcome.FAILED, pool="long"),
    ]
    found = tails(records, lambda one: one.ttft_s)
    assert found == pytest.approx({"all": 2.98, "long": 3.0, "short": 1.0})


def fleet_row(source: str, ttft_s: float, **figures: object) -> Row:
    tails_of = {
        "p99_ttft_s": {"all": [ttft_s] * 2, "short": [1.0, 1.0]},
        "p99_tpot_s": {"all": [0.05, 0.07], "short": [0.04, 0.04]},
    }
    return row(
        {"source": source},
        {**tails_of, **figures},
        experiment="planned_fleet",
        seeds=(0, 1),
        settings={"rate_per_s": 4.0, "seconds": 60.0, "slo_ttft_s": 2.0, "slo_tpot_s": 0.08},
    )


def test_the_table_sets_planned_simulated_and_observed_side_by_side() -> None:
    rows = [
        fleet_row("planned", 2.0, plan={"replicas": COUNTS}),
        fleet_row("simulated", 1.0),
        fleet_row("observed", 1.5, lost=[1, 1], requests=[100, 100], late=[0, 3], within=[0.99, 0.97]),
    ]
    written = TABLES["pools"].written(rows)
    lines = written.splitlines()
    assert lines[2] == "| P99 TTFT, s | all | 2.00 ± 0.00 | 1.00 ± 0.00 | 1.50 ± 0.00 | 2 |"
    # Nobody went long, so there is no tail, rather than one of zero.
    assert lines[4] == "| P99 TTFT, s | long | - | - | - | - |"
    assert lines[5] == "| P99 TPOT, ms | all | 60 ± 127 | 60 ± 127 | 60 ± 127 | 80 |"
    assert "2 short and 3 long replicas for 4 requests/s" in written
    assert "98.0 % of requests were within both limits, 2 of 200 did not complete" in written
    assert "sent 3 late" in written
