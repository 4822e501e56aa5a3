"""Fleets that are compared: one worst-case pool, one pool with paged KV cache, and two pools.

- `worst-case-homogeneous` is the papers' baseline: a batch holds as many sequences as would fit if each had
  the longest context (16 at 64K in the papers).
- `paged-homogeneous` is the fair baseline, because vLLM allocates KV blocks only as tokens are computed: one
  pool, with the profile's number of sequences and the chunk limit of the scheduler's policy.
- `pools` are a short and a long one, each with separate settings and profile.

All three have the same scheduler and receive the same requests. Prices are GPU hours from a table, which
users can replace.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.core.settings_base import POSITIVE, settings
from serve_app.engines.model.profiles import load_profile
from serve_app.errors import SettingsError
from serve_app.lab.planning.queueing import LengthMix, PoolModel
from serve_app.lab.simulation.fleet import ONE_POOL, EngineChanges, FleetSettings, PoolChanges

_DATA = resources.files("serve_app.lab.planning") / "gpu_costs.yaml"


@settings
class GpuCost:
    """Price of one kind of GPU.

    Attributes:
        usd_per_hour: price of one GPU.
        source: of the price, such as a list price, a contract or an estimate.
        date: year and month of the price.
    """

    usd_per_hour: Annotated[float, POSITIVE]
    source: str
    date: str


_ADAPTER = TypeAdapter(dict[str, GpuCost])


class CostTable:
    """Prices of engines by the GPUs that they need."""

    def __init__(self, costs: Mapping[str, GpuCost]) -> None:
        self.costs = dict(costs)

    @classmethod
    def load(cls, path: Path | None = None) -> "CostTable":
        """Load a table from a file, or the built-in one.

        Raises:
            SettingsError: the file does not contain such a table.
        """
        try:
            text = _DATA.read_text("utf-8") if path is None else path.read_text("utf-8")
            return cls(_ADAPTER.validate_python(yaml.safe_load(text)))
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise SettingsError(f"{path} is not a table of GPU costs: {error}") from error

    def gpu_of(self, profile: str) -> str:
        """Return the GPU of a profile, from its name `model-gpu-tpN`.

        Raises:
            SettingsError: the table has no GPU of that name.
        """
        name = Path(profile).name.removesuffix(".yaml").removesuffix(".yml")
        for part in reversed(name.split("-")):
            if part in self.costs:
                return part
        raise SettingsError(
            f"no cost for the GPU of profile {profile!r}: name it model-gpu-tpN with one of the GPUs "
            f"{', '.join(sorted(self.costs))}, or add its GPU in a cost table (--costs FILE)"
        )

    def usd_per_hour(self, profile: str) -> float:
        """Return the price of one engine of a profile, with all its GPUs."""
        return load_profile(profile).gpus * self.costs[self.gpu_of(profile)].usd_per_hour


WORST_CASE = "worst-case-homogeneous"
PAGED = "paged-homogeneous"
POOLS = "pools"

_PAPER_CONTEXT = 65_536

ReplicaCounts = Mapping[str, int]
"""Replicas by pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The engines of one pool.

    Attributes:
        profile: name or path of their profile.
        engine: changes of their settings.
    """

    profile: str
    engine: EngineChanges = field(default_factory=EngineChanges)

    def __str__(self) -> str:
        changes = {name: value for name, value in asdict(self.engine).items() if value is not None}
        return " ".join([self.profile, *(f"{name}={value}" for name, value in changes.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A kind of fleet, without numbers of replicas.

    Attributes:
        name: one of the three above.
        pools: one pool, or `short` and `long` in this order.
        b_short_tokens: largest token budget of the short pool.
    """

    name: str
    pools: Mapping[str, PoolPlan]
    b_short_tokens: int = 8_192

    def settings(self, counts: ReplicaCounts) -> FleetSettings:
        """Return the fleet with these replicas, for the simulator."""
        first = next(iter(self.pools.values()))
        return FleetSettings(
            profile=first.profile,
            replicas={pool: counts[pool] for pool in self.pools},
            b_short_tokens=self.b_short_tokens,
            by_pool={
                pool: PoolChanges(profile=plan.profile, engine=plan.engine)
                for pool, plan in self.pools.items()
            },
        )

    def usd_per_hour(self, counts: ReplicaCounts, costs: CostTable) -> float:
        """Return the price of all replicas."""
        return sum(counts[pool] * costs.usd_per_hour(plan.profile) for pool, plan in self.pools.items())

    def gpus(self, counts: ReplicaCounts) -> int:
        """Return the GPUs of all replicas."""
        return sum(counts[pool] * load_profile(plan.profile).gpus for pool, plan in self.pools.items())

    def models(self, mix: LengthMix) -> dict[str, PoolModel]:
        """Return the queueing model of each pool for its part of the mix, with the policy's chunk limit."""
        parts = dict(zip(self.pools, mix.split(self.b_short_tokens), strict=False))
        if len(self.pools) == 1:
            parts = dict.fromkeys(self.pools, mix)
        plans = self.settings(dict.fromkeys(self.pools, 1)).plans(isolated=True)
        return {plan.pool: PoolModel(plan.step_time, plan.engine, parts[plan.pool]) for plan in plans}

    def as_json(self) -> dict[str, Any]:
        """Return profiles and changes by pool."""
        return {
            "b_short_tokens": self.b_short_tokens if len(self.pools) > 1 else None,
            "pools": {pool: asdict(plan) for pool, plan in self.pools.items()},
        }


def worst_case_slots(profile: str) -> int:
    """Return the sequences that fit into the KV cache at the longest context: the papers' `max_num_seqs`.

    The longest context is the profile's, or the papers' 64K if that is shorter.
    """
    engine = load_profile(profile)
    context = min(engine.max_model_len, _PAPER_CONTEXT)
    return max(1, min(engine.max_num_seqs, engine.kv_tokens // context))


def worst_case_fleet(profile: str, slots: int) -> FleetPlan:
    """Return one pool whose batches hold `slots` sequences."""
    return FleetPlan(
        name=WORST_CASE,
        pools={ONE_POOL: PoolPlan(profile=profile, engine=EngineChanges(max_num_seqs=slots))},
    )


def paged_fleet(pool: PoolPlan) -> FleetPlan:
    """Return one pool with paged KV cache."""
    return FleetPlan(name=PAGED, pools={ONE_POOL: pool})


def split_fleet(short: PoolPlan, long: PoolPlan, b_short_tokens: int) -> FleetPlan:
    """Return a short and a long pool."""
    return FleetPlan(name=POOLS, pools={"short": short, "long": long}, b_short_tokens=b_short_tokens)
