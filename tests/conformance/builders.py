"""Overloaded fleet for all conformance tests."""

from typing import Any

from serve_app.core import SchedulerSettings
from serve_app.core.decision_log import Decision
from serve_app.core.routing.pools import RoutingSettings
from serve_app.lab.simulation.simulation import Simulation
from tests.lab.simulation.builders import mixed_requests, plan


def simulated(
    policy: str, *, requests: int = 150, rate_per_s: float = 16.0, **changes: Any
) -> tuple[Simulation, list[Decision]]:
    """Simulate a short and a long replica under this policy; return the run and its decisions."""
    log: list[Decision] = []
    settings = SchedulerSettings(
        model="m", policy=policy, routing=RoutingSettings(b_short_tokens=500), **changes
    )
    plans = [
        plan("s1", "short", max_model_len=1_000, kv_tokens=3_000),
        plan("l1", "long", max_model_len=4_000, kv_tokens=6_000),
    ]
    simulation = Simulation(settings, plans, on_decision=log.append)
    simulation.run(mixed_requests(requests, rate_per_s=rate_per_s, seed=1))
    return simulation, log
