"""What the scenes are played with."""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any

from serve_app.settings_base import at_least, settings
from serve_app.simulation.fleet import ONE_POOL, EngineChanges, FleetSettings
from serve_app.simulation.simulation import SimulationSettings


@settings
class Variant:
    """One way to serve a scene.

    Attributes:
        policy: of the gateway's queue; None is no gateway.
        scheduler: settings by dotted path.
        engine: what it changes in every engine.
        simulation: how late reports are.
    """

    policy: str | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineChanges = field(default_factory=EngineChanges)
    simulation: SimulationSettings = field(default_factory=SimulationSettings)


@settings
class FairnessSettings:
    """What is played.

    Attributes:
        scenes: each with its variants, by the names that they have in the tables.
        seeds: runs of each variant by scene, with the seeds 0, 1, ...
        weights: of the tenants of the scene `weights`.
        weights_window_s: the span of that scene in which service is counted.
        light_s: how long requests arrive in the scene `light`.
        span_s: the same for the other scenes.
        light_tenants: beside the heavy one, which sends as much as all of them.
    """

    profile: str
    replicas: int
    seeds: Mapping[str, int]
    scenes: Mapping[str, Mapping[str, Variant]]
    weights: Mapping[str, float]
    weights_window_s: tuple[float, float] = (40.0, 100.0)
    light_s: float = 100.0
    span_s: Annotated[float, at_least(10).hint("users come after 5 s")] = 30.0
    light_tenants: int = 26

    def fleet(self, engine: EngineChanges, replicas: int | None = None) -> FleetSettings:
        """All replicas, or so many, in one pool."""
        count = self.replicas if replicas is None else replicas
        return FleetSettings(profile=self.profile, replicas={ONE_POOL: count}, engine=engine)

    def with_variants(self, scene: str, variants: Mapping[str, Variant]) -> "FairnessSettings":
        """The same with this scene alone: what a row records."""
        return replace(self, scenes={scene: variants})
