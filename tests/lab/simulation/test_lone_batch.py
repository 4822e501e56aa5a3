"""Batch work alone: there is no other work to hold it back for."""

import random

from serve_app.lab.simulation.fleet import ONE_POOL, FleetSettings
from serve_app.lab.simulation.scheduler_settings import scheduler_settings
from serve_app.lab.simulation.simulation import Simulation
from serve_app.lab.simulation.workload import Disclosure, requests_of
from serve_app.lab.workloads.trace import Trace, TraceRequest
from serve_app.request import PriorityClass

FLEET = FleetSettings(profile="llama31-8b-rtx4090-tp1", replicas={ONE_POOL: 1})


def seconds_for_a_backlog(priority: PriorityClass) -> float:
    rng = random.Random(0)
    backlog = [
        TraceRequest(
            arrival_s=0.0,
            prompt_tokens=rng.randint(50, 250),
            output_tokens=rng.randint(20, 80),
            tenant="t",
            priority=priority,
        )
        for _ in range(600)
    ]
    plans = FLEET.plans(isolated=True)
    trace = Trace(name="backlog", source="backlog", requests=tuple(backlog))
    requests = list(requests_of(trace, Disclosure(), plans[0].engine.block_size))
    records = Simulation(scheduler_settings("ewsjf", FLEET.routing, {}), plans).run(requests)
    return max(record.finished_at for record in records)


def test_a_backlog_of_short_batch_requests_takes_no_longer_than_of_any_others() -> None:
    others_s = seconds_for_a_backlog(PriorityClass.DEFAULT)
    assert seconds_for_a_backlog(PriorityClass.BATCH) < 1.05 * others_s
