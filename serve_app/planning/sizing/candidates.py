"""What a search chooses from, and what it finds: the words of `search` and `results`."""

from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.errors import SettingsError
from serve_app.planning.model.closed_form import ClosedForm
from serve_app.planning.sizing.fleets import Counts, FleetPlan
from serve_app.planning.sizing.sizing import SizedPool
from serve_app.planning.sizing.verification import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What the planner may choose from.

    Attributes:
        profile: of the undivided fleets; any pool may use it too.
        short_profiles, long_profiles: further ones for a pool. Those that can hold the longest requests
            compete for the undivided fleet as well.
        b_short_tokens: borders to try.
        worst_case_slots: `max_num_seqs` of the worst-case fleet; None is KV cache over longest context.
        variants: also other batch settings than the profiles' own.
        candidates: two-pool fleets, and undivided ones, that are simulated.
    """

    profile: str
    short_profiles: tuple[str, ...] = ()
    long_profiles: tuple[str, ...] = ()
    b_short_tokens: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    worst_case_slots: int | None = None
    variants: bool = True
    candidates: int = 3

    def __post_init__(self) -> None:
        if not self.b_short_tokens or min(self.b_short_tokens) < 1:
            raise SettingsError(f"borders between pools must be positive, got {self.b_short_tokens}")
        if self.candidates < 1:
            raise SettingsError(f"at least one candidate must be simulated, got {self.candidates}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A fleet as the model sizes it, at full size.

    Attributes:
        usd_per_hour: by the model's numbers.
    """

    plan: FleetPlan
    pools: dict[str, SizedPool]
    usd_per_hour: float

    @property
    def counts(self) -> dict[str, int]:
        """Replicas by pool."""
        return {pool: sized.replicas for pool, sized in self.pools.items()}

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Those within the limits first, then the cheaper; at one cost, whoever has more to spare."""
        beyond = not all(sized.within_limits for sized in self.pools.values())
        return beyond, self.usd_per_hour, sum(sized.performance.utilisation for sized in self.pools.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedFleet:
    """A fleet as the simulator sizes it.

    Attributes:
        candidate: where the search began.
        verification: of the fleet that was simulated, a stand-in if `share` is below 1.
        headroom: by which the rate of a stand-in can grow, see `Verifier.headroom`.
        counts: replicas by pool at full size.
        usd_by_pool: per hour.
    """

    candidate: Candidate
    verification: Verification
    share: float
    headroom: float
    counts: Counts
    usd_by_pool: Mapping[str, float]
    gpus: int

    @property
    def usd_per_hour(self) -> float:
        """Of the whole fleet."""
        return sum(self.usd_by_pool.values())

    @property
    def plan(self) -> FleetPlan:
        """The kind of fleet."""
        return self.candidate.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What came of a search; a fleet is None when nothing simulated met the limits.

    Attributes:
        modelled: the best two-pool fleet by the model for each border.
        simulated: all fleets that were sized by simulation.
        against_paged, against_worst_case: closed forms of the chosen pools.
    """

    worst_case: SizedFleet | None
    paged: SizedFleet | None
    pools: SizedFleet | None
    modelled: tuple[Candidate, ...]
    simulated: tuple[SizedFleet, ...]
    against_paged: ClosedForm | None
    against_worst_case: ClosedForm | None
