"""What is played: fleets of two pools, scenarios of a drifting mix, values of `B_short`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from experiments.adaptive_b_short.documents import DocumentMix
from experiments.common.drifting_mix import MixPoints
from experiments.common.rows import Key
from serve_app.metrics.slo import Slo
from serve_app.settings_base import settings
from serve_app.simulation.fleet import EngineChanges, FleetSettings, PoolChanges

ADAPTIVE = "adaptive"


@settings
class TwoPools:
    """A fleet; its engines are the same whatever `B_short` is.

    Attributes:
        load: 1.0 is the rate at which the fleet finishes a backlog of the mix under FCFS.
        context_tokens, short_context_tokens: limits of the engines in all pools, and in the short one.
    """

    profile: str
    replicas: Mapping[str, int]
    load: float
    context_tokens: int = 16_384
    short_context_tokens: int = 16_384

    def fleet(self, b_short_tokens: int) -> FleetSettings:
        """The fleet with this `B_short` at the start."""
        return FleetSettings(
            profile=self.profile,
            replicas=self.replicas,
            b_short_tokens=b_short_tokens,
            engine=EngineChanges(max_model_len=self.context_tokens),
            by_pool={"short": PoolChanges(engine=EngineChanges(max_model_len=self.short_context_tokens))},
        )


@settings
class Scenario:
    """Traffic of chats and documents.

    Attributes:
        documents: their share over time.
    """

    documents: MixPoints
    mix: DocumentMix = field(default_factory=DocumentMix)


@settings
class Part:
    """Cells of the table: one fleet in some scenarios.

    Attributes:
        fixed_tokens: values of a fixed `B_short`, beside the adaptive one.
        gated: whether replicas above `tpot_gate_s` are sent nothing, which makes requests spill earlier.
    """

    fleet: str
    scenarios: tuple[str, ...]
    fixed_tokens: tuple[int, ...]
    gated: bool = False


@settings
class AdaptiveExperiment:
    """What is played.

    Attributes:
        adaptive_from_tokens: where the adaptive `B_short` begins.
        tpot_gate_s: of those parts that are gated.
        slo: what attainment counts.
        short_at_tokens: longest prompt that counts as short, in the figures alone.
    """

    policy: str
    fleets: Mapping[str, TwoPools]
    scenarios: Mapping[str, Scenario]
    parts: tuple[Part, ...]
    adaptive_from_tokens: int
    seeds: int
    duration_s: float
    tpot_gate_s: float = 0.1
    slo: Slo = field(default_factory=lambda: Slo(ttft_s=2.0, tpot_s=0.1))
    short_at_tokens: int = 1_024

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.fleet not in self.fleets:
                raise ValueError(f"there is no fleet {part.fleet!r}: there are {', '.join(self.fleets)}")
            for name in part.scenarios:
                if name not in self.scenarios:
                    raise ValueError(f"there is no scenario {name!r}: there are {', '.join(self.scenarios)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A line of the table.

    Attributes:
        fixed_tokens: None is the adaptive `B_short`.
    """

    fleet: str
    scenario: str
    gated: bool
    fixed_tokens: int | None

    @property
    def key(self) -> Key:
        """Of its row."""
        b_short = ADAPTIVE if self.fixed_tokens is None else f"{self.fixed_tokens:,}"
        return {"fleet": self.fleet, "scenario": self.scenario, "gated": self.gated, "b_short": b_short}


def cells_of(experiment: AdaptiveExperiment) -> list[Cell]:
    """All of them, in the order of the table."""
    return [
        Cell(fleet=part.fleet, scenario=scenario, gated=part.gated, fixed_tokens=fixed)
        for part in experiment.parts
        for scenario in part.scenarios
        for fixed in (*part.fixed_tokens, None)
    ]
