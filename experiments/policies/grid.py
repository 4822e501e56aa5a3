"""A table of runs: policies by traces, loads, profiles and seeds, written down in one YAML file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.errors import SettingsError
from serve_app.simulation.batch import saturated_rates
from serve_app.simulation.estimate_noise import LengthNoise
from serve_app.simulation.fleet import ONE_POOL, EngineChanges, FleetSettings
from serve_app.simulation.partitions import PartitionSource
from serve_app.simulation.run import RunSettings, SloByLength, policy_names
from serve_app.simulation.simulation import SimulationSettings
from serve_app.simulation.workload import Disclosure, TraceChoice

_STRICT: Mapping[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy with what belongs to it.

    Attributes:
        policy: its name; the variant's own name unless given.
        engine: what it changes in every engine.
        scheduler: settings by dotted path.
        partition: as `--partition` of `simulate`; empty leaves it to whoever plays the experiment.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    policy: str = ""
    engine: EngineChanges = field(default_factory=EngineChanges)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    partition: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the policies are put to.

    Attributes:
        name: in the table; the trace's name unless given.
        loads: shares of the saturated rate.
        short_at_tokens: longest prompt that counts as short, in the figures alone.
        length_noise: see `estimate_noise.LengthNoise`.
        flip_mix: exchange the shares of short and long prompts half-way.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    trace: str
    loads: tuple[float, ...]
    name: str = ""
    requests: int | None = None
    short_at_tokens: int = 256
    tenants: str | None = None
    arrivals: str | None = None
    flip_mix: bool = False
    length_noise: float = 0.0
    output_known: bool = False
    world: SimulationSettings = field(default_factory=SimulationSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """All runs of a table.

    Attributes:
        profiles: engine profiles.
        replicas: engines in one pool.
        variants: policies by the name that they have in the table.
        seeds: runs of each, with the seeds 0, 1, ...
        requests: in each run, where the case names no number.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = _STRICT

    profiles: tuple[str, ...]
    variants: Mapping[str, Variant]
    cases: tuple[Case, ...]
    replicas: int = 4
    seeds: int = 5
    requests: int = 20_000

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.requests < 1:
            raise ValueError(f"seeds and requests must be at least 1, got {self.seeds} and {self.requests}")
        if not (self.profiles and self.variants and self.cases):
            raise ValueError("an experiment needs at least one profile, one variant and one case")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run stands in the table."""

    case: str
    profile: str
    load: float
    policy: str
    seed: int


_ADAPTER = TypeAdapter(Experiment)


def load_experiment(path: Path) -> Experiment:
    """Read an experiment.

    Raises:
        SettingsError: the file is none; the message names what is wrong.
    """
    try:
        return _ADAPTER.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise SettingsError(f"{path} is not an experiment: {error}") from error


def without_unknown_policies(experiment: Experiment) -> tuple[Experiment, list[str]]:
    """The experiment with the variants whose policy there is, and the names of the others."""
    known = set(policy_names())
    missing = [name for name, variant in experiment.variants.items() if (variant.policy or name) not in known]
    variants = {name: variant for name, variant in experiment.variants.items() if name not in missing}
    return replace(experiment, variants=variants), missing


def _prior(_partition: str) -> PartitionSource | None:
    return None


def planned(
    experiment: Experiment, *, jobs: int, partition_of: Callable[[str], PartitionSource | None] = _prior
) -> Iterator[tuple[Place, RunSettings]]:
    """Every run at its rate, in the order of the table; measures first what load 1.0 is.

    All variants of a case meet the same requests at the same times: what a variant changes in the engine has
    no part in the rate.

    Args:
        partition_of: where queues come from, by a variant's `partition`.
    """
    bare = Variant(policy="fcfs")
    blocks = [
        (case, profile, seed)
        for case in experiment.cases
        for profile in experiment.profiles
        for seed in range(experiment.seeds)
    ]
    references = [_run(experiment, block, "fcfs", bare) for block in blocks]
    rates = dict(zip(map(_key, blocks), saturated_rates(references, jobs=jobs), strict=True))
    for case in experiment.cases:
        for profile in experiment.profiles:
            for load in case.loads:
                for name, variant in experiment.variants.items():
                    source = partition_of(variant.partition)
                    for seed in range(experiment.seeds):
                        block = (case, profile, seed)
                        run = _run(experiment, block, name, variant)
                        place = Place(case.name or case.trace, profile, load, name, seed)
                        rate = load * rates[_key(block)]
                        yield place, replace(run, load=load, rate_per_s=rate, partition=source)


_Block = tuple[Case, str, int]


def _key(block: _Block) -> str:
    return repr(block)


def _run(experiment: Experiment, block: _Block, name: str, variant: Variant) -> RunSettings:
    case, profile, seed = block
    return RunSettings(
        policy=variant.policy or name,
        label=name,
        fleet=FleetSettings(profile=profile, replicas={ONE_POOL: experiment.replicas}, engine=variant.engine),
        trace=_trace(experiment, case),
        seed=seed,
        disclosure=Disclosure(output_known=case.output_known),
        noise=LengthNoise(relative_error=case.length_noise),
        world=case.world,
        scheduler=variant.scheduler,
        slo=SloByLength(short_at_tokens=case.short_at_tokens),
        short_at_tokens=case.short_at_tokens,
    )


def _trace(experiment: Experiment, case: Case) -> TraceChoice:
    return TraceChoice(
        name=case.trace,
        requests=case.requests or experiment.requests,
        tenants=case.tenants,
        arrivals=case.arrivals,
        flip_mix_at=case.short_at_tokens if case.flip_mix else None,
    )


def only(experiment: Experiment, *, variants: Sequence[str] = (), cases: Sequence[str] = ()) -> Experiment:
    """A part of an experiment; an empty selection selects all.

    Raises:
        SettingsError: it holds nothing of that name.
    """
    names = [case.name or case.trace for case in experiment.cases]
    for wanted, there in ((variants, list(experiment.variants)), (cases, names)):
        for name in wanted:
            if name not in there:
                raise SettingsError(f"the experiment has no {name!r}: it has {', '.join(there)}")
    return replace(
        experiment,
        variants={name: one for name, one in experiment.variants.items() if not variants or name in variants},
        cases=tuple(
            case for case, name in zip(experiment.cases, names, strict=True) if not cases or name in cases
        ),
    )
