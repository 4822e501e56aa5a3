"""Engines that report neither load nor limits: the scheduler finds their batch size from latency."""

from serve_app.lab.simulation.fleet import ONE_POOL, EngineChanges, FleetSettings
from serve_app.lab.simulation.run import RunSettings, simulate
from serve_app.lab.simulation.workload import TraceChoice

PROFILE = "llama31-8b-rtx4090-tp1"


def fleet(*, reports_load: bool) -> FleetSettings:
    return FleetSettings(
        profile=PROFILE,
        replicas={ONE_POOL: 1},
        engine=EngineChanges(max_num_seqs=16),
        reports_load=reports_load,
    )


def run(*, reports_load: bool) -> float:
    """Return the goodput of an engine with a batch of 16 near saturation."""
    trace = TraceChoice(name="paper-mix", requests=400)
    result = simulate(
        RunSettings(policy="ewsjf", fleet=fleet(reports_load=reports_load), trace=trace, rate_per_s=5.0)
    )
    assert result.summary.completed == len(result.measured)
    return result.summary.goodput_per_s


def test_an_engine_of_unknown_load_serves_nearly_as_well() -> None:
    assert run(reports_load=False) > 0.9 * run(reports_load=True)
