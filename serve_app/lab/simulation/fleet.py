"""Fleet of a run: the number of replicas in each pool, their profile, and changes to their engines."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Annotated

from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings_base import FINITE_POSITIVE, settings
from serve_app.engines.model.profiles import load_profile
from serve_app.engines.model.sequences import EngineModelSettings, SchedulingPolicy
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import SettingsError
from serve_app.lab.simulation.simulation import ReplicaPlan

ONE_POOL = "all"
"""Name of the only pool of a fleet."""


@settings
class EngineChanges:
    """Changes to the profile's engine, named as in `EngineModelSettings`; None changes nothing.

    The chunk limit of long prefills is an exception. With a policy that isolates them, None is the profile's
    limit (`StepTimeModel.chunk_tokens`), which is part of the method; 0 is no limit.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None
    scheduling_policy: SchedulingPolicy | None = None


@settings
class PoolChanges:
    """Differences of the engines of one pool.

    Attributes:
        profile: name or path of a separate engine profile, such as another tensor-parallel degree; None for
            the fleet's.
        engine: changes to them, in addition to the changes to every engine.
        cost, boundary_tokens: as in a model's pool (`settings.pools`).
    """

    profile: str | None = None
    engine: EngineChanges = field(default_factory=EngineChanges)
    cost: Annotated[float, FINITE_POSITIVE] = 1.0
    boundary_tokens: int | None = None


_UNCHANGED = PoolChanges()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The replicas of one run.

    Attributes:
        profile: name or path of an engine profile.
        replicas: number of replicas by pool, those with shorter contexts first.
        b_short_tokens: with several pools, the boundary of the first one, and the context of its engines
            unless they have another.
        engine: changes to every engine.
        by_pool: differences of individual pools.
        reports_load: whether its engines have metrics and report their limits, see `ReplicaPlan`.
    """

    profile: str
    replicas: Mapping[str, int] = field(default_factory=lambda: {ONE_POOL: 1})
    b_short_tokens: int = 8_192
    engine: EngineChanges = field(default_factory=EngineChanges)
    by_pool: Mapping[str, PoolChanges] = field(default_factory=dict)
    reports_load: bool = True

    def __post_init__(self) -> None:
        names = tuple(self.replicas)
        if not names:
            raise SettingsError("a fleet needs at least one pool, got none")
        for pool, count in self.replicas.items():
            if count < 1:
                raise SettingsError(f"pool {pool} needs at least one replica, got {count}")
        for pool in self.by_pool:
            if pool not in self.replicas:
                raise SettingsError(f"the fleet has no pool {pool!r} to change: it has {', '.join(names)}")

    @property
    def routing(self) -> RoutingSettings:
        """The routing settings that follow from the pools."""
        pools = [self.by_pool.get(pool, _UNCHANGED) for pool in self.replicas]
        boundaries = tuple(pool.boundary_tokens for pool in pools[1:-1])
        costs = tuple(pool.cost for pool in pools)
        return RoutingSettings(
            pools=tuple(self.replicas),
            b_short_tokens=self.b_short_tokens,
            boundaries_tokens=boundaries if any(boundaries) else (),
            costs=costs if len(set(costs)) > 1 else (),
        )

    @property
    def gpus(self) -> int:
        """Number of GPUs in the whole fleet."""
        return sum(count * load_profile(self.profile_of(pool)).gpus for pool, count in self.replicas.items())

    def without_chunk_limits(self) -> "FleetSettings":
        """Return the same replicas without changes to the chunk limit for long prefills."""
        by_pool = {
            pool: replace(changes, engine=replace(changes.engine, long_prefill_token_threshold=None))
            for pool, changes in self.by_pool.items()
        }
        return replace(
            self,
            engine=replace(self.engine, long_prefill_token_threshold=None),
            # Pools without any remaining changes are dropped, so that equal replicas have equal settings.
            by_pool={pool: changes for pool, changes in by_pool.items() if changes != _UNCHANGED},
        )

    def profile_of(self, pool: str) -> str:
        """Return the name or path of the engine profile of a pool."""
        return self.by_pool.get(pool, _UNCHANGED).profile or self.profile

    def plans(self, *, isolated: bool = False) -> list[ReplicaPlan]:
        """Return one plan per replica, pool by pool.

        Args:
            isolated: whether long prefills are isolated, so that the chunk limit has a default.

        Raises:
            SettingsError: there is no such profile, or pools are not in the order of their contexts.
            ValueError: the changed engine contradicts itself.
        """
        plans = self._plans(isolated=isolated)
        for plan, longer in pairwise(plans):
            if plan.engine.max_model_len > longer.engine.max_model_len:
                raise SettingsError(
                    "pools must be listed by increasing context, got "
                    f"max_model_len {plan.engine.max_model_len:,} in {plan.pool} "
                    f"before {longer.engine.max_model_len:,} in {longer.pool}"
                )
        return plans

    def _plans(self, *, isolated: bool) -> list[ReplicaPlan]:
        return [
            ReplicaPlan(
                replica_id=f"{pool}-{number}",
                pool=pool,
                engine=engine,
                step_time=step_time,
                reports_load=self.reports_load,
            )
            for pool, count in self.replicas.items()
            for engine, step_time in [self._engine_of(pool, isolated=isolated)]
            for number in range(1, count + 1)
        ]

    def _engine_of(self, pool: str, *, isolated: bool) -> tuple[EngineModelSettings, StepTimeModel]:
        profile = load_profile(self.profile_of(pool))
        own = asdict(self.by_pool.get(pool, _UNCHANGED).engine)
        changes = asdict(self.engine) | {name: value for name, value in own.items() if value is not None}
        if isolated and changes["long_prefill_token_threshold"] is None:
            changes["long_prefill_token_threshold"] = profile.step_time.chunk_tokens()
        is_first = pool == next(iter(self.replicas))
        if len(self.replicas) > 1 and is_first and own["max_model_len"] is None:
            longest = changes["max_model_len"] or profile.max_model_len
            changes["max_model_len"] = min(longest, self.b_short_tokens)
        return profile.model_settings(**changes), profile.step_time
