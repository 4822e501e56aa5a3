"""Which replicas are simulated? A profile, how many of it in each pool, and what is changed in its engine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from serve_app.engines.emulation.settings import EngineModelSettings
from serve_app.engines.emulation.waiting import SchedulingPolicy
from serve_app.engines.profiles import load_profile
from serve_app.errors import SettingsError
from serve_app.routing.pools import RoutingSettings
from serve_app.simulation.replica import ReplicaPlan

ONE_POOL = "all"
"""Name of the pool of a fleet that is not divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChanges:
    """What is changed in the profile's engine, named as in `EngineModelSettings`; None changes nothing.

    But for the chunk limit of long prefills: under a policy that isolates them, None is the profile's own
    (`StepTimeModel.chunk_tokens`), which belongs to the method; 0 is no limit.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None
    scheduling_policy: SchedulingPolicy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The replicas of one run.

    Attributes:
        profile: name or path of an engine profile.
        replicas: number of replicas by pool; a single pool goes by any name, two are `short` and `long`.
        b_short_tokens: with two pools, the context of the short one's engines, and the token budget up to
            which a request is at home there.
        engine: what is changed in every engine.
    """

    profile: str
    replicas: Mapping[str, int] = field(default_factory=lambda: {ONE_POOL: 1})
    b_short_tokens: int = 8_192
    engine: EngineChanges = field(default_factory=EngineChanges)

    def __post_init__(self) -> None:
        names = tuple(self.replicas)
        if len(names) != 1 and names != ("short", "long"):
            raise SettingsError(
                f"a fleet has one pool, or the pools short and long in this order, got {', '.join(names)}"
            )
        for pool, count in self.replicas.items():
            if count < 1:
                raise SettingsError(f"pool {pool} needs at least one replica, got {count}")

    @property
    def routing(self) -> RoutingSettings:
        """What the scheduler is told of the pools."""
        return RoutingSettings(pools=tuple(self.replicas), b_short_tokens=self.b_short_tokens)

    @property
    def gpus(self) -> int:
        """GPUs under the whole fleet."""
        return sum(self.replicas.values()) * load_profile(self.profile).gpus

    def plans(self, *, isolated: bool = False) -> list[ReplicaPlan]:
        """One plan for each replica, pool by pool.

        Args:
            isolated: long prefills are kept apart, so the engine's chunk limit is set unless it is given.

        Raises:
            SettingsError: there is no such profile.
            ValueError: the changed engine contradicts itself.
        """
        step_time = load_profile(self.profile).step_time
        if isolated and self.engine.long_prefill_token_threshold is None:
            chunked = replace(self.engine, long_prefill_token_threshold=step_time.chunk_tokens())
            return replace(self, engine=chunked).plans()
        return [
            ReplicaPlan(replica_id=f"{pool}-{number}", pool=pool, engine=engine, step_time=step_time)
            for pool, count in self.replicas.items()
            for engine in [self._engine_of(pool)]
            for number in range(1, count + 1)
        ]

    def _engine_of(self, pool: str) -> EngineModelSettings:
        engine = load_profile(self.profile).model_settings(**asdict(self.engine))
        if len(self.replicas) == 1 or pool != "short":
            return engine
        shorter = asdict(self.engine) | {"max_model_len": min(engine.max_model_len, self.b_short_tokens)}
        return load_profile(self.profile).model_settings(**shorter)
