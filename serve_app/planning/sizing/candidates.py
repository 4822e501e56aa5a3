"""The options, candidates and results of a search for a fleet."""

from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.errors import SettingsError
from serve_app.planning.model.closed_form import ClosedForm
from serve_app.planning.sizing.fleets import Counts, FleetPlan
from serve_app.planning.sizing.modelled import SizedPool
from serve_app.planning.sizing.verification import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of a search.

    Attributes:
        profile: of the undivided fleets; any pool may use it too.
        short_profiles, long_profiles: further profiles for a pool. Those that can hold the longest requests
            are candidates for the undivided fleet as well.
        b_short_tokens: values of `B_short` to try.
        worst_case_slots: `max_num_seqs` of the worst-case fleet; None is KV cache over longest context.
        variants: whether to try other batch settings than the profiles' own.
        candidates: number of two-pool fleets, and of undivided ones, to simulate.
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
            raise SettingsError(f"values of B_short must be positive, got {self.b_short_tokens}")
        if self.candidates < 1:
            raise SettingsError(f"at least one candidate must be simulated, got {self.candidates}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A fleet, sized by the model at full size.

    Attributes:
        usd_per_hour: for the model's numbers of replicas.
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
        """Sort key: within the limits first, then cheaper, then less utilised."""
        beyond = not all(sized.within_limits for sized in self.pools.values())
        return beyond, self.usd_per_hour, sum(sized.performance.utilisation for sized in self.pools.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedFleet:
    """A fleet, sized by the simulator.

    Attributes:
        candidate: the model's size, where the search began.
        verification: of the simulated fleet, which is a stand-in if `share` is below 1.
        headroom: factor by which the rate of a stand-in can grow, see `Verifier.headroom`.
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
        """The price of the whole fleet."""
        return sum(self.usd_by_pool.values())

    @property
    def plan(self) -> FleetPlan:
        """The kind of fleet."""
        return self.candidate.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The result of a search; a fleet is None when no simulated one met the limits.

    Attributes:
        modelled: the best two-pool fleet by the model, for each `B_short`.
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
