"""Which settings of a model does the tuner touch, and what are they now?

A `Tunable` is what a candidate changes: the scheduler's settings, and those of Refine-and-Prune. `space_of`
names the parameters that matter under its policy and pools, with their values in force.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.errors import SettingsError
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.policies import make_policy
from serve_app.scheduling.policies.ewsjf import EwsjfPaper
from serve_app.scheduling.policies.settings import GivenWeights
from serve_app.tuning.partition.settings import RefineAndPruneSettings
from serve_app.tuning.search.search_space import Parameter, Scale, SearchSpace, SettingPart, Values
from serve_app.tuning.search.settings_path import value_at, with_value

_WEIGHTS = (
    Parameter(name="a_u", path="ewsjf.weights.a_u", low=-1e-3, high=1e-2),
    Parameter(name="b_u", path="ewsjf.weights.b_u", low=0.01, high=5.0, scale=Scale.LOG),
    Parameter(name="a_f", path="ewsjf.weights.a_f", low=-1e-3, high=1e-3),
    Parameter(name="b_f", path="ewsjf.weights.b_f", low=0.01, high=2.0, scale=Scale.LOG),
)
_QUEUES = (
    Parameter(name="alpha", path="alpha", low=0.5, high=3.0, part=SettingPart.PARTITION),
    Parameter(
        name="max_queues",
        path="max_queues",
        low=4,
        high=64,
        scale=Scale.LOG,
        integer=True,
        part=SettingPart.PARTITION,
    ),
)
_ISOLATION = (
    Parameter(
        name="max_long_prefills",
        path="isolation.max_long_prefills",
        low=1,
        high=8,
        scale=Scale.LOG,
        integer=True,
    ),
    Parameter(
        name="max_longest_prefills",
        path="isolation.max_longest_prefills",
        low=1,
        high=8,
        scale=Scale.LOG,
        integer=True,
    ),
    Parameter(name="short_work_share", path="isolation.short_work_share", low=0.05, high=0.6),
    Parameter(name="longest_work_share", path="isolation.longest_work_share", low=0.1, high=0.8),
)
_TARGET_WAITING = Parameter(
    name="target_waiting",
    path="backpressure.target_waiting",
    low=1,
    high=16,
    scale=Scale.LOG,
    integer=True,
)
# An engine that orders its own queue may have a longer one, which has a setting of its own.
_PRIORITY_TARGET_WAITING = replace(_TARGET_WAITING, path="engine_priority.target_waiting", high=64)

_LEAST_B_SHORT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """Settings of one model, as far as they can be tuned."""

    scheduler: SchedulerSettings
    refine_and_prune: RefineAndPruneSettings = field(default_factory=RefineAndPruneSettings)

    def __post_init__(self) -> None:
        # Weights that are not given are the policy's; to change one of them, all have to be written down.
        object.__setattr__(self, "scheduler", with_weights(self.scheduler))

    def value(self, parameter: Parameter) -> float:
        """The value in force."""
        value: float = value_at(self._part(parameter.part), parameter.path)
        return value

    def with_values(self, values: Values, parameters: Iterable[Parameter]) -> "Tunable":
        """The same with other values.

        Raises:
            SettingsError: the settings cannot have one of them.
        """
        tuned = self
        for parameter in parameters:
            tuned = tuned.with_setting(parameter, values[parameter.name])
        return tuned

    def with_setting(self, parameter: Parameter, value: object) -> "Tunable":
        """The same with another value of one parameter.

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
    """The same settings with the weights of the score written down: the policy's, if none are given."""
    policy = make_policy(settings.policy)
    if not isinstance(policy, EwsjfPaper):
        return settings
    weights = GivenWeights.all_of(settings.ewsjf.weights.over(policy.default_weights))
    return replace(settings, ewsjf=replace(settings.ewsjf, weights=weights))


def parameters_of(settings: SchedulerSettings, context_of_short: int | None = None) -> tuple[Parameter, ...]:
    """The parameters that change something under these settings.

    Args:
        context_of_short: with two pools, the context limit of the shorter one in tokens; None leaves the
            budget that is at home there as it is.
    """
    policy = make_policy(settings.policy)
    engine_orders = settings.engine_priority.enabled
    return (
        *(_WEIGHTS if isinstance(policy, EwsjfPaper) else ()),
        *(_QUEUES if policy.learns_queues else ()),
        *(_ISOLATION if policy.isolates and settings.isolation.max_long_prefills else ()),
        _PRIORITY_TARGET_WAITING if engine_orders else _TARGET_WAITING,
        *_pools(settings, context_of_short),
    )


def _pools(settings: SchedulerSettings, context_of_short: int | None) -> Iterator[Parameter]:
    routing = settings.routing
    # A border that moves by itself would undo whatever is set.
    if len(routing.pools) < 2 or routing.adaptive_b_short.enabled:
        return
    if context_of_short is None or context_of_short <= _LEAST_B_SHORT:
        return
    # What is at home in the short pool must fit there.
    yield Parameter(
        name="b_short_tokens",
        path="routing.b_short_tokens",
        low=_LEAST_B_SHORT,
        high=context_of_short,
        scale=Scale.LOG,
        integer=True,
    )


def space_of(
    tunable: Tunable, *, context_of_short: int | None = None, only: Sequence[str] = ()
) -> SearchSpace:
    """The search space around the settings in force.

    Args:
        context_of_short: see `parameters_of`.
        only: names of the parameters to tune; all that matter, when it is empty.

    Raises:
        SettingsError: there is no parameter of such a name.
    """
    parameters = {each.name: each for each in parameters_of(tunable.scheduler, context_of_short)}
    if unknown := set(only) - set(parameters):
        raise SettingsError(
            f"cannot tune {', '.join(sorted(unknown))}: under policy {tunable.scheduler.policy} there are "
            f"{', '.join(parameters)}"
        )
    chosen = [each for name, each in parameters.items() if not only or name in only]
    return SearchSpace(chosen, {each.name: tunable.value(each) for each in chosen})


def as_model_settings(space: SearchSpace, values: Values) -> dict[str, Any]:
    """What to write into a model's settings so that it has these values."""
    tree: dict[str, Any] = {}
    for parameter in space:
        _plant(tree, parameter.model_path, values[parameter.name])
    return tree


def _plant(tree: dict[str, Any], path: str, value: object) -> None:
    *branches, leaf = path.split(".")
    for branch in branches:
        tree = tree.setdefault(branch, {})
    tree[leaf] = value


def started_from(tunable: Tunable, parameters: Sequence[Parameter], start: Mapping[str, object]) -> Tunable:
    """The same with some values changed, by short name or by the path of the setting.

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
