"""The number of replicas of every pool of a model, decided together once a second."""

from collections.abc import Mapping
from dataclasses import replace

from serve_app.routing.snapshot import Snapshot, number, section
from serve_app.scaling.gpu_budget import PoolNeed, share_gpus
from serve_app.scaling.observation import PoolView
from serve_app.scaling.pool_scaler import PoolDecision, PoolScaler
from serve_app.scaling.settings import ScalingSettings


class FleetScaler:
    """Decides for all pools of a model."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._pools = {name: PoolScaler(pool) for name, pool in settings.pools.items()}

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that it decides for."""
        return tuple(self._pools)

    def change(self, settings: ScalingSettings) -> None:
        """Decide within other bounds from now on; what was learned of the same pools stays."""
        self._settings = settings
        for name, scaler in self._pools.items():
            scaler.change(settings.pools[name])

    def state(self) -> dict[str, object]:
        """What was learned and cannot be seen again at once, as plain values: the start times of engines."""
        learned = {name: scaler.start_time.learned_s() for name, scaler in self._pools.items()}
        return {"start_s": {name: seconds for name, seconds in learned.items() if seconds is not None}}

    def restore(self, state: Snapshot) -> None:
        """Go on from what `state` returned; pools that are not there any more are left out.

        Raises:
            ValueError: a value is missing or out of range; nothing was restored then.
        """
        kept = section(state, "start_s")
        found = {name: number(kept, name, at_least=0) for name in kept if name in self._pools}
        for name, seconds in found.items():
            self._pools[name].start_time.restore(seconds)

    def decide(self, views: Mapping[str, PoolView], now: float) -> dict[str, PoolDecision]:
        """What every pool should have.

        Args:
            views: one for each pool.
            now: seconds; never less than at the call before.
        """
        decisions = {name: scaler.decide(views[name], now) for name, scaler in self._pools.items()}
        needs = {name: self._need(name, decision) for name, decision in decisions.items()}
        given = share_gpus(needs, self._settings.gpu_budget)
        for name, scaler in self._pools.items():
            scaler.settle(given[name], now)
            if self._settings.pools[name].replicas is not None:
                # What it would need is told; what it takes of the budget is what it has.
                continue
            if given[name] < decisions[name].replicas:
                reason = f"{decisions[name].reason}; the GPU budget leaves no more"
                decisions[name] = replace(
                    # What it has beyond this is another pool's by now.
                    decisions[name],
                    replicas=given[name],
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
