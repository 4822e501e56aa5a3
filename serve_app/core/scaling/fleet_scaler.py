"""Autoscaling of a model: the number of replicas of all its pools, decided once per second."""

from collections.abc import Mapping
from dataclasses import replace

from serve_app.core.routing.snapshot import Snapshot, number, section
from serve_app.core.scaling.gpu_budget import PoolNeed, share_gpus
from serve_app.core.scaling.observation import PoolView
from serve_app.core.scaling.pool_scaler import PoolDecision, PoolScaler
from serve_app.core.scaling.settings import ScalingSettings


class FleetScaler:
    """Decides the number of replicas for all pools of a model."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._pools = {name: PoolScaler(pool) for name, pool in settings.pools.items()}

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that it decides for."""
        return tuple(self._pools)

    def change(self, settings: ScalingSettings) -> None:
        """Apply other bounds from now on. Learned values of the same pools are retained."""
        self._settings = settings
        for name, scaler in self._pools.items():
            scaler.change(settings.pools[name])

    def state(self) -> dict[str, object]:
        """Return the learned start times of engines as plain values."""
        learned = {name: scaler.start_time.learned_s() for name, scaler in self._pools.items()}
        return {"start_s": {name: seconds for name, seconds in learned.items() if seconds is not None}}

    def restore(self, state: Snapshot) -> None:
        """Continue from a result of `state`, except for removed pools. Changes nothing if it is invalid."""
        stored = section(state, "start_s")
        found = {name: number(stored, name, at_least=0) for name in stored if name in self._pools}
        for name, seconds in found.items():
            self._pools[name].start_time.restore(seconds)

    def decide(self, views: Mapping[str, PoolView], now: float) -> dict[str, PoolDecision]:
        """Return the replicas that every pool should have.

        Args:
            views: one for each pool.
            now: time in seconds, not less than in the previous call.
        """
        decisions = {name: scaler.decide(views[name], now) for name, scaler in self._pools.items()}
        needs = {name: self._need(name, decision) for name, decision in decisions.items()}
        allocated = share_gpus(needs, self._settings.gpu_budget)
        for name, scaler in self._pools.items():
            scaler.settle(allocated[name], now)
            if self._settings.pools[name].replicas is not None:
                # The decision reports the pool's need, but the budget is charged for its fixed replicas.
                continue
            if allocated[name] < decisions[name].replicas:
                reason = f"{decisions[name].reason}; limited by the GPU budget"
                decisions[name] = replace(
                    # The replicas beyond this number are already allocated to another pool.
                    decisions[name],
                    replicas=allocated[name],
                    reason=reason,
                    may_shrink=True,
                )
        return decisions

    def _need(self, name: str, decision: PoolDecision) -> PoolNeed:
        pool = self._settings.pools[name]
        return PoolNeed(
            replicas=decision.replicas if pool.replicas is None else pool.replicas,
            needed=decision.needed,
            least=pool.least,
            gpus=pool.gpus,
        )

    def __repr__(self) -> str:
        return f"<FleetScaler {', '.join(f'{name} {each.desired}' for name, each in self._pools.items())}>"
