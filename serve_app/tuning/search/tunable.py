"""The settings of a model that the tuner may change, and the search space around their values in force.

A `Tunable` holds what a candidate changes: the scheduler's settings, and those of Refine-and-Prune.
`parameters_of` names the parameters that have an effect under its policy and pools.

Sources: the paper's theta = {a_u, b_u, a_f, b_f, alpha} and its ranges (EWSJF, arXiv 2601.21758, section
4.4). b_u and b_f go from 0.01 up, because our score needs less urgency than the paper's. Their lower bounds
are floors: no weight of the score is ever tuned away. Alpha goes beyond the paper's 3, up to where it makes
no more queues than k-means alone. All other parameters are this scheduler's own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from serve_app.errors import SettingsError
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.policies import make_policy
from serve_app.scheduling.policies.ewsjf import EwsjfPaper
from serve_app.scheduling.policies.settings import GivenWeights
from serve_app.settings_base import ADVANCED, as_written
from serve_app.tuning.partition.settings import RefineAndPruneSettings
from serve_app.tuning.search.search_space import Parameter, Scale, SearchSpace, SettingPart, Values
from serve_app.tuning.search.settings_path import value_at, with_value

_count = partial(Parameter, scale=Scale.LOG, integer=True)

_WEIGHTS = (
    Parameter(name="a_u", path="ewsjf.weights.a_u", low=-1e-3, high=1e-2),
    Parameter(name="b_u", path="ewsjf.weights.b_u", low=0.01, high=5.0, scale=Scale.LOG),
    Parameter(name="a_f", path="ewsjf.weights.a_f", low=-1e-3, high=1e-3),
    Parameter(name="b_f", path="ewsjf.weights.b_f", low=0.01, high=2.0, scale=Scale.LOG),
)
# From as many queues as are allowed down to the clusters of k-means alone; 0.5 to 3 in the paper.
_ALPHA = Parameter(name="alpha", path="alpha", low=0.5, high=8.0, scale=Scale.LOG, part=SettingPart.PARTITION)
_ISOLATION = (
    _count(name="max_long_prefills", path="isolation.max_long_prefills", low=1, high=8),
    _count(name="max_longest_prefills", path="isolation.max_longest_prefills", low=1, high=8),
    Parameter(name="short_work_share", path="isolation.short_work_share", low=0.05, high=0.6),
    Parameter(name="longest_work_share", path="isolation.longest_work_share", low=0.1, high=0.8),
)
_TARGET_WAITING = _count(name="target_waiting", path="backpressure.target_waiting", low=1, high=16)
# An engine that orders its own queue may have a longer one, which has a setting of its own.
_PRIORITY_TARGET_WAITING = replace(_TARGET_WAITING, path="engine_priority.target_waiting", high=64)

_MIN_B_SHORT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """Settings of one model, as far as they can be tuned."""

    scheduler: SchedulerSettings
    refine_and_prune: RefineAndPruneSettings = field(default_factory=RefineAndPruneSettings)

    def __post_init__(self) -> None:
        # Weights that are not given are the policy's; to change one of them, all have to be given.
        object.__setattr__(self, "scheduler", with_weights(self.scheduler))

    def value(self, parameter: Parameter) -> float:
        """The value in force."""
        value: float = value_at(self._part(parameter.part), parameter.path)
        return value

    def with_values(self, values: Values, parameters: Iterable[Parameter]) -> "Tunable":
        """The same tunable with other values of these parameters.

        Raises:
            SettingsError: the settings cannot have one of them.
        """
        tuned = self
        for parameter in parameters:
            tuned = tuned.with_setting(parameter, values[parameter.name])
        return tuned

    def with_setting(self, parameter: Parameter, value: object) -> "Tunable":
        """The same tunable with another value of one parameter.

        Raises:
            SettingsError: the settings cannot have it.
        """
        part = with_value(self._part(parameter.part), parameter.path, value)
        if isinstance(part, SchedulerSettings):
            return replace(self, scheduler=part)
        return replace(self, refine_and_prune=part)

    def _part(self, part: SettingPart) -> SchedulerSettings | RefineAndPruneSettings:
        return self.scheduler if part is SettingPart.SCHEDULER else self.refine_and_prune


def with_weights(settings: SchedulerSettings) -> SchedulerSettings:
    """The same settings with every weight of the score given; by default the policy's."""
    policy = make_policy(settings.policy)
    if not isinstance(policy, EwsjfPaper):
        return settings
    weights = GivenWeights.all_of(settings.ewsjf.weights.over(policy.default_weights))
    return replace(settings, ewsjf=replace(settings.ewsjf, weights=weights))


def parameters_of(
    settings: SchedulerSettings, max_b_short_tokens: int | None = None
) -> tuple[Parameter, ...]:
    """The parameters that have an effect under these settings.

    Args:
        max_b_short_tokens: upper bound of `b_short_tokens`: with two pools, the context limit of the short
            one, in tokens. None leaves `b_short_tokens` as it is.
    """
    policy = make_policy(settings.policy)
    engine_orders = settings.engine_priority.enabled
    return (
        *(_WEIGHTS if isinstance(policy, EwsjfPaper) else ()),
        *((_ALPHA,) if policy.learns_queues else ()),
        *(_ISOLATION if policy.isolates and settings.isolation.max_long_prefills else ()),
        _PRIORITY_TARGET_WAITING if engine_orders else _TARGET_WAITING,
        *_pools(settings, max_b_short_tokens),
    )


def _pools(settings: SchedulerSettings, max_b_short_tokens: int | None) -> Iterator[Parameter]:
    routing = settings.routing
    # A boundary that adapts by itself would undo whatever is set.
    if len(routing.pools) < 2 or routing.adaptive_b_short.enabled:
        return
    if max_b_short_tokens is None or max_b_short_tokens <= _MIN_B_SHORT_TOKENS:
        return
    # Every request up to b_short must fit the engines of the short pool.
    yield _count(
        name="b_short_tokens",
        path="routing.b_short_tokens",
        low=_MIN_B_SHORT_TOKENS,
        high=max_b_short_tokens,
    )


def space_of(
    tunable: Tunable, *, max_b_short_tokens: int | None = None, only: Sequence[str] = ()
) -> SearchSpace:
    """The search space around the values in force.

    Args:
        max_b_short_tokens: see `parameters_of`.
        only: names of the parameters to tune; when it is empty, all that have an effect.

    Raises:
        SettingsError: there is no parameter of such a name.
    """
    parameters = {each.name: each for each in parameters_of(tunable.scheduler, max_b_short_tokens)}
    if unknown := set(only) - set(parameters):
        raise SettingsError(
            f"cannot tune {', '.join(sorted(unknown))}: under policy {tunable.scheduler.policy} there are "
            f"{', '.join(parameters)}"
        )
    chosen = [each for name, each in parameters.items() if not only or name in only]
    return SearchSpace(chosen, {each.name: tunable.value(each) for each in chosen})


def as_model_settings(space: SearchSpace, values: Values) -> dict[str, Any]:
    """The part of a model's settings that gives these values, as a file has it."""
    parts: dict[SettingPart, dict[str, Any]] = {part: {} for part in SettingPart}
    for parameter in space:
        _plant(parts[parameter.part], parameter.path, values[parameter.name])
    scheduler = as_written(SchedulerSettings, parts[SettingPart.SCHEDULER])
    refine_and_prune = parts[SettingPart.PARTITION]
    tuner = {ADVANCED.value: {"strategic": {"refine_and_prune": refine_and_prune}}}
    return {"scheduler": scheduler} | ({"tuner": tuner} if refine_and_prune else {})


def _plant(tree: dict[str, Any], path: str, value: object) -> None:
    *branches, leaf = path.split(".")
    for branch in branches:
        tree = tree.setdefault(branch, {})
    tree[leaf] = value


def started_from(tunable: Tunable, parameters: Sequence[Parameter], start: Mapping[str, object]) -> Tunable:
    """The same tunable with some values changed, by short name or by the path of the setting.

    Raises:
        SettingsError: there is no such parameter, or it cannot have this value.
    """
    by_name = {each.name: each for each in parameters} | {each.path: each for each in parameters}
    for name, value in start.items():
        if name not in by_name:
            raise SettingsError(
                f"cannot start from {name}: there are {', '.join(p.name for p in parameters)}"
            )
        wanted = (int,) if by_name[name].integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            kind = "a whole number" if by_name[name].integer else "a number"
            raise SettingsError(f"{name} must be {kind}, got {value!r}")
        tunable = tunable.with_setting(by_name[name], value)
    return tunable
