"""Autoscaling in the scheduler's process: decides once per second from the state of the live scheduler.

It outlives the actor's live schedulers, so that learned properties of engines are retained. The first
decision is delayed until replicas have had time to connect to the first live scheduler.
"""

import asyncio
import logging
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serve_app.core import Scheduler
from serve_app.core.routing.snapshot import Amount
from serve_app.core.scaling import FleetScaler, PoolDecision, ScalingSettings, observe
from serve_app.serving.autoscaling import statistics
from serve_app.serving.metric_cells import counters
from serve_app.serving.scheduler.gauges import Figures

logger = logging.getLogger("ray.serve")

_INTERVAL_S = 1.0
# Replicas connect to a new scheduler within seconds.
_SETTLING_S = 6.0

_GAUGES: tuple[tuple[str, str, Callable[[PoolDecision], float]], ...] = (
    ("ewsjf_desired_replicas", "Replicas that a pool should have.", lambda each: each.replicas),
    ("ewsjf_pool_load_engines", "Offered load of a pool, in engines.", lambda each: each.load),
    (
        "ewsjf_pool_backlog_seconds",
        "Queued work of a pool, in seconds of one engine.",
        lambda each: each.backlog_s,
    ),
)


class ScalingState(Struct):
    """Learned start times of engines by pool."""

    start_s: dict[str, Amount]


class LiveScaling(Collector):
    """Autoscaler of one model's pools; `registry` exports its last decision."""

    def __init__(self, model: str, settings: ScalingSettings, registry: CollectorRegistry) -> None:
        self._model = model
        self._settings = settings
        self._scaler = FleetScaler(settings)
        self._loop = asyncio.get_running_loop()
        self._begins_at = math.inf
        self._decisions: dict[str, PoolDecision] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._core: Scheduler | None = None
        registry.register(self)
        text = "Failed autoscaling decisions; the last successful one stays in effect."
        self._failures = counters(registry, "ewsjf_scaling_failures", text, ("model",))[(model,)]
        text = "Autoscaling decisions by direction: more replicas (`up`) or fewer (`down`)."
        labels = ("model", "pool", "direction")
        self._changes = counters(registry, "ewsjf_scaling_decisions", text, labels)
        self._begin_counts()
        # Type and location of the last failure, whose message may contain changing values; None if the last
        # decision succeeded.
        self._fault: tuple[type[Exception], str, int | None] | None = None

    def __repr__(self) -> str:
        return f"<LiveScaling {self._scaler}>"

    def follow(self, core: Scheduler) -> None:
        """Observe this scheduler from now on, once replicas have had time to connect."""
        self._core = core
        self._begins_at = self._loop.time() + _SETTLING_S
        if self._timer is None:
            self._timer = self._loop.call_later(_INTERVAL_S, self._tick)

    def change(self, settings: ScalingSettings) -> None:
        """Apply other bounds to the same pools."""
        self._settings = settings
        self._scaler.change(settings)
        self._begin_counts()

    def state(self) -> ScalingState:
        """Return the learned state for persistence (see `snapshot`)."""
        return ScalingState(self._scaler.start_times())

    def restore(self, state: ScalingState) -> None:
        """Restore persisted state; see `FleetScaler.restore`."""
        self._scaler.restore(state.start_s)

    def stop(self) -> None:
        """Stop deciding."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def statistics(self) -> dict[str, float]:
        """Return the targets for Serve, see `serving.autoscaling`; empty before the first decision."""
        scaled = {
            name: decision.replicas
            for name, decision in self._decisions.items()
            if self._settings.pools[name].autoscaling is not None
        }
        return statistics(scaled, {name for name in scaled if not self._decisions[name].may_shrink})

    def gpus(self) -> dict[str, float]:
        """Return the GPUs per replica, by pool."""
        return {name: pool.gpus for name, pool in self._settings.pools.items()}

    def status(self) -> dict[str, Any]:
        """Return the last decision, for operators and external autoscalers."""
        return {
            "model": self._model,
            "gpu_budget": self._settings.gpu_budget,
            "pools": {
                name: {
                    "desired_replicas": decision.replicas,
                    **{key: value for key, value in asdict(decision).items() if key != "replicas"},
                    "scaled_by": "ewsjf" if self._settings.pools[name].autoscaling else "external",
                }
                for name, decision in self._decisions.items()
            },
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; prometheus_client calls this for each page."""
        for name, text, value in _GAUGES:
            figures = Figures(name, text, "pool")
            for pool, decision in self._decisions.items():
                figures[pool,] = value(decision)
            yield figures.of_model(self._model)

    def _begin_counts(self) -> None:
        """Create the counters, so that rates before the first change are 0 instead of absent."""
        for name, pool in self._settings.pools.items():
            if pool.autoscaling is not None:
                for direction in ("up", "down"):
                    self._changes[self._model, name, direction].inc(0)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_INTERVAL_S, self._tick)
        now = self._loop.time()
        if self._core is None or now < self._begins_at:
            return
        try:
            decisions = self._scaler.decide(observe(self._core, self._scaler.pools, now), now)
        except Exception as error:  # noqa: BLE001 - logged; the last decision stays in effect
            self._on_fault(error)
            return
        if self._fault is not None:
            logger.info("event=scaling_recovered model=%s", self._model)
            self._fault = None
        for name, decision in decisions.items():
            self._log_change(name, decision)
        self._decisions = decisions

    def _on_fault(self, error: Exception) -> None:
        """Count a failure, and log it unless it repeats the last one."""
        self._failures.inc()
        frames = traceback.extract_tb(error.__traceback__)
        fault = type(error), frames[-1].filename, frames[-1].lineno
        if fault != self._fault:
            logger.exception(
                "event=scaling_failed model=%s reason=%r action='the last decision stays in effect'",
                self._model,
                error,
            )
        self._fault = fault

    def _log_change(self, name: str, decision: PoolDecision) -> None:
        before = self._decisions.get(name)
        if before is None or before.replicas == decision.replicas:
            return
        if self._settings.pools[name].autoscaling is None:
            return
        direction = "up" if decision.replicas > before.replicas else "down"
        self._changes[self._model, name, direction].inc()
        logger.info(
            "event=pool_scaled model=%s pool=%s replicas=%d before=%d ready=%d reason=%r",
            self._model,
            name,
            decision.replicas,
            before.replicas,
            decision.ready,
            decision.reason,
        )
