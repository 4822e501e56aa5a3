"""Tunable settings of a model, the search space around their current values, and the optimiser.

- `Tunable`: what a candidate changes: the scheduler's settings, and those of Refine-and-Prune.
  `parameters_of` returns the parameters that have an effect with its policy and pools.
- `with_value`: a copy of settings with another value under a dotted path.
- `SearchSpace`: the parameters with their current values.
- `TpeOptimiser`: proposes candidate values from the rewards of earlier ones.

`Tunable`. Sources: the paper's theta = {a_u, b_u, a_f, b_f, alpha} and its ranges (EWSJF, arXiv 2601.21758,
section 4.4). The lower bounds of b_u and b_f are floors: tuning never removes a weight of the score. Alpha
exceeds the paper's 3, up to where it makes no more queues than k-means alone. All other parameters are this
scheduler's own.

`with_value`. Nested frozen settings are accessed by dotted paths, such as `isolation.max_long_prefills`. A
change creates new settings and runs the checks of every class on the path, so an invalid value is rejected
with the settings' own message.

`SearchSpace`. Each parameter has a short name, the path of its setting, bounds and a scale. The scale maps
its range to [0, 1]: the *unit*. a_u and a_f have values around 1e-3, while a queue count goes into the tens;
in units they are comparable.

The optimiser samples uniformly from another [0, 1], the *draw*. The prior maps draws to units: `spread` of
its mass is uniform, the rest rises towards the current value (a triangle). So a search begins near the
current values, and still reaches every corner, which it must if they are bad. With c the unit of the current
value and s the spread, for u up to c:

    F(u) = s * u + (1 - s) * u^2 / c          and, mirrored, above c

so that F(c) = c, and its inverse is a square root.

`TpeOptimiser`. The tree-structured Parzen estimator (TPE) samples where good candidates are dense and bad
ones are not. The first `startup` candidates, usually the incumbent and the presets, are given to it; if there
are fewer, the others are sampled from the prior of the search space. Candidates without a reward count as
bad, so that proposals made at the same time differ.

An optimiser has no state except its candidates: a proposal is determined by the seed and the earlier rewards.

Source: Bergstra, Bardenet, Bengio, Kegl, Algorithms for Hyper-Parameter Optimization (NIPS 2011), in the
implementation of hyperopt.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from serve_app.core import SchedulerSettings
from serve_app.core.policies import make_policy
from serve_app.core.policies.ewsjf import Ewsjf
from serve_app.core.settings_base import changed
from serve_app.errors import SettingsError
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.workloads import plain_stream
from serve_app.tuning.objective import finite
from serve_app.tuning.strategic_loop import RefineAndPruneSettings

Settings = TypeVar("Settings")


def value_at(settings: object, path: str) -> Any:
    """Return the value under a path.

    Raises:
        SettingsError: there is no such setting.
    """
    value = settings
    for name in path.split("."):
        if not is_dataclass(value) or name not in {field.name for field in fields(value)}:
            raise SettingsError(f"unknown setting {path}: {type(value).__name__} has no {name!r}")
        value = getattr(value, name)
    return value


def with_value(settings: Settings, path: str, value: object) -> Settings:
    """Return a copy with another value under a path.

    Raises:
        SettingsError: there is no such setting, or it cannot have this value.
    """
    # Raises with the path if there is no such setting.
    value_at(settings, path)
    try:
        return changed(settings, path, value)
    except ValueError as error:
        raise SettingsError(f"{path} cannot be {value}: {error}") from error


def with_values(settings: Settings, values: Mapping[str, object]) -> Settings:
    """Return a copy with other values by path."""
    for path, value in values.items():
        settings = with_value(settings, path, value)
    return settings


Values = Mapping[str, float]
"""Values of parameters by short name."""

_SPREAD = 0.3
"""With this spread, the prior is nearly six times as dense near the current value as far from it."""

_DIGITS = 4
"""Significant digits of a value. More only make settings hard to read."""


class Scale(StrEnum):
    """Mapping of a range to [0, 1]."""

    LINEAR = "linear"
    LOG = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A setting that can be tuned.

    Attributes:
        path: path of the setting within its part; for the scheduler as in `simulate --set`.
        low, high: inclusive bounds.
        scale: linear or logarithmic.
        integer: whole numbers only.
        is_queue_parameter: whether it is a setting of Refine-and-Prune, and so of the tuner.
    """

    name: str
    path: str
    low: float
    high: float
    scale: Scale = Scale.LINEAR
    integer: bool = False
    is_queue_parameter: bool = False

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"{self.name}: bounds must be in order, got {self.low} and {self.high}")
        if self.scale is Scale.LOG and self.low <= 0:
            raise ValueError(f"{self.name}: a logarithmic scale must begin above 0, got {self.low}")
        if self.integer and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise ValueError(f"{self.name}: bounds must be whole numbers, got {self.low} and {self.high}")

    def clipped(self, value: float) -> float:
        """Return the nearest valid value."""
        return self._rounded(min(max(value, self.low), self.high))

    def unit(self, value: float) -> float:
        """Return the position of a value between the bounds, 0 to 1, clipped to them."""
        at, low, high = self._scaled(min(max(value, self.low), self.high)), *self._ends()
        return (at - low) / (high - low)

    def at_unit(self, unit: float) -> float:
        """Return the value at a unit, the inverse of `unit`."""
        low, high = self._ends()
        at = low + min(max(unit, 0.0), 1.0) * (high - low)
        return self.clipped(math.exp(at) if self.scale is Scale.LOG else at)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.scale is Scale.LOG else value

    def _ends(self) -> tuple[float, float]:
        return self._scaled(self.low), self._scaled(self.high)

    def _rounded(self, value: float) -> float:
        if self.integer:
            return int(value + 0.5)
        # Rounding must not exceed the bounds.
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)


class SearchSpace:
    """Parameters with their current values.

    Args:
        current: a value for each parameter; if one exceeds the bounds, the search begins at the bound.

    Raises:
        SettingsError: there are no parameters, or a value is missing or not a number.
    """

    def __init__(self, parameters: Sequence[Parameter], current: Values) -> None:
        if not parameters:
            raise SettingsError("at least one parameter is required")
        self._parameters = {each.name: each for each in parameters}
        if len(self._parameters) != len(parameters):
            raise SettingsError("two parameters have the same name")
        self.current = self.checked(current)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters.values())

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, name: str) -> Parameter:
        return self._parameters[name]

    def __repr__(self) -> str:
        return f"<SearchSpace {' '.join(f'{name}={value:g}' for name, value in self.current.items())}>"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters, in order."""
        return tuple(self._parameters)

    def checked(self, values: Values) -> dict[str, float]:
        """Return the values unchanged, in the order of the parameters.

        Raises:
            SettingsError: a value is missing, unknown or not a finite number.
        """
        if unknown := set(values) - set(self._parameters):
            raise SettingsError(
                f"unknown parameter {', '.join(sorted(unknown))}: use {', '.join(self.names)}"
            )
        for name in self.names:
            value = values.get(name)
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise SettingsError(f"{name} must be a finite number, got {value!r}")
        return {name: values[name] for name in self.names}

    def clipped(self, values: Values) -> dict[str, float]:
        """Return each value clipped to its bounds.

        Raises:
            SettingsError: as for `checked`.
        """
        return {name: self[name].clipped(value) for name, value in self.checked(values).items()}

    def from_draws(self, draws: Mapping[str, float]) -> dict[str, float]:
        """Return the values for uniform draws from [0, 1]."""
        return {name: self[name].at_unit(_quantile(draws[name], self._centre(name))) for name in self.names}

    def draws_of(self, values: Values) -> dict[str, float]:
        """Return the draws for these values, clipped to the bounds."""
        return {
            name: _distribution(self[name].unit(value), self._centre(name))
            for name, value in self.checked(values).items()
        }

    def _centre(self, name: str) -> float:
        return self[name].unit(self.current[name])


def _distribution(unit: float, centre: float) -> float:
    """Return the prior's F at a unit."""
    if unit <= centre:
        return _SPREAD * unit + (1 - _SPREAD) * unit**2 / centre if centre > 0 else 0.0
    return 1.0 - _distribution(1.0 - unit, 1.0 - centre)


def _quantile(draw: float, centre: float) -> float:
    """Return the inverse of F."""
    if draw <= centre:
        if centre == 0:
            return draw
        root = math.sqrt(_SPREAD**2 + 4 * (1 - _SPREAD) * draw / centre)
        return centre * (root - _SPREAD) / (2 * (1 - _SPREAD))
    return 1.0 - _quantile(1.0 - draw, 1.0 - centre)


_count = partial(Parameter, scale=Scale.LOG, integer=True)

_WEIGHTS = (
    Parameter(name="a_u", path="ewsjf.weights.a_u", low=-1e-3, high=1e-2),
    Parameter(name="b_u", path="ewsjf.weights.b_u", low=0.01, high=5.0, scale=Scale.LOG),
    Parameter(name="a_f", path="ewsjf.weights.a_f", low=-1e-3, high=1e-3),
    Parameter(name="b_f", path="ewsjf.weights.b_f", low=0.01, high=2.0, scale=Scale.LOG),
)
# From the maximum number of queues down to the clusters of k-means alone; 0.5 to 3 in the paper.
_ALPHA = Parameter(name="alpha", path="alpha", low=0.5, high=8.0, scale=Scale.LOG, is_queue_parameter=True)
_ISOLATION = (
    _count(name="max_long_prefills", path="isolation.max_long_prefills", low=1, high=8),
    _count(name="max_longest_prefills", path="isolation.max_longest_prefills", low=1, high=8),
    Parameter(name="short_work_share", path="isolation.short_work_share", low=0.05, high=0.6),
    Parameter(name="longest_work_share", path="isolation.longest_work_share", low=0.1, high=0.8),
)
_TARGET_WAITING = _count(name="target_waiting", path="backpressure.target_waiting", low=1, high=16)
# The queue of an engine that orders it by priority may be longer, and has a separate setting.
_PRIORITY_TARGET_WAITING = replace(_TARGET_WAITING, path="engine_priority.target_waiting", high=64)

_DELAY_BOUND = Parameter(name="wait_ratio", path="delay_bound.wait_ratio", low=0.5, high=8.0, scale=Scale.LOG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """The tunable settings of one model."""

    scheduler: SchedulerSettings
    refine_and_prune: RefineAndPruneSettings = field(default_factory=RefineAndPruneSettings)

    def value(self, parameter: Parameter) -> float:
        """Return the current value."""
        value: float = value_at(self._part(parameter), parameter.path)
        return value

    def with_values(self, values: Values, parameters: Iterable[Parameter]) -> "Tunable":
        """Return a copy with other values of these parameters.

        Raises:
            SettingsError: a value is not valid for the settings.
        """
        tuned = self
        for parameter in parameters:
            tuned = tuned.with_setting(parameter, values[parameter.name])
        return tuned

    def with_setting(self, parameter: Parameter, value: object) -> "Tunable":
        """Return a copy with another value of one parameter.

        Raises:
            SettingsError: the value is not valid for the settings.
        """
        part = with_value(self._part(parameter), parameter.path, value)
        if isinstance(part, SchedulerSettings):
            return replace(self, scheduler=part)
        return replace(self, refine_and_prune=part)

    def _part(self, parameter: Parameter) -> SchedulerSettings | RefineAndPruneSettings:
        return self.refine_and_prune if parameter.is_queue_parameter else self.scheduler


def parameters_of(settings: SchedulerSettings) -> tuple[Parameter, ...]:
    """Return the parameters that have an effect with these settings."""
    policy = make_policy(settings.policy, table=SIMULATED_POLICIES)
    engine_orders = settings.engine_priority.enabled
    return (
        *(_WEIGHTS if isinstance(policy, Ewsjf) else ()),
        *((_ALPHA,) if policy.learns_queues else ()),
        *(_ISOLATION if policy.isolates and settings.isolation.max_long_prefills else ()),
        *((_DELAY_BOUND,) if policy.bounds_delay and settings.delay_bound.wait_ratio else ()),
        _PRIORITY_TARGET_WAITING if engine_orders else _TARGET_WAITING,
    )


def space_of(tunable: Tunable, *, only: Sequence[str] = ()) -> SearchSpace:
    """Return the search space around the current values.

    Args:
        only: names of the parameters to tune; if empty, all that have an effect.

    Raises:
        SettingsError: there is no parameter of such a name.
    """
    parameters = {each.name: each for each in parameters_of(tunable.scheduler)}
    if unknown := set(only) - set(parameters):
        raise SettingsError(
            f"cannot tune {', '.join(sorted(unknown))}: the parameters of policy {tunable.scheduler.policy} "
            f"are {', '.join(parameters)}"
        )
    chosen = [each for name, each in parameters.items() if not only or name in only]
    return SearchSpace(chosen, {each.name: tunable.value(each) for each in chosen})


# Rounding to integers or four digits may map two draws to the same values, and a repetition adds nothing.
_REDRAWS = 5
_STARTUP = 12


class TpeOptimiser:
    """TPE in a search space.

    Args:
        startup: candidates before the estimator is used.
    """

    def __init__(self, space: SearchSpace, *, seed: int = 0, startup: int = _STARTUP) -> None:
        # Imported here because it takes a second, for which importers of the settings should not wait.
        from hyperopt import Domain, hp  # noqa: PLC0415 - see above

        self._space, self._seed, self._startup = space, seed, startup
        self._domain = Domain(None, {name: hp.uniform(name, 0.0, 1.0) for name in space.names})
        # By number. The loss of a candidate without a reward is infinite.
        self._candidates: list[Values] = []
        self._losses: list[float] = []

    def __repr__(self) -> str:
        return f"<TpeOptimiser candidates={len(self._candidates)}>"

    def add(self, values: Values) -> None:
        """Add a candidate. They are numbered from 0."""
        self._candidates.append(self._space.clipped(values))
        self._losses.append(math.inf)

    def propose(self) -> Values:
        """Add a new candidate, and return its values.

        They differ from all others, unless several draws in a row give known ones.
        """
        number = len(self._candidates)
        values: Values = {}
        for attempt in range(_REDRAWS):
            values = self._space.from_draws(self._draws(number, f"proposal {number}.{attempt}"))
            if values not in self._candidates:
                break
        self.add(values)
        return values

    def tell(self, rewards: Mapping[int, float | None]) -> None:
        """Record rewards by number of the candidate. A reward that is not finite counts as none."""
        for number, reward in rewards.items():
            known = finite(reward)
            self._losses[number] = math.inf if known is None else -known

    def _draws(self, number: int, stream: str) -> dict[str, float]:
        """Return a draw from [0, 1] for each parameter."""
        from hyperopt import tpe, trials_from_docs  # noqa: PLC0415 - see `__init__`

        trials = trials_from_docs([self._document(each) for each in range(number)], validate=False)
        seed = plain_stream(self._seed, stream).getrandbits(31)
        (document,) = tpe.suggest(
            [number], self._domain, trials, seed, n_startup_jobs=self._startup, verbose=False
        )
        drawn = document["misc"]["vals"]
        return {name: float(drawn[name][0]) for name in self._space.names}

    def _document(self, number: int) -> dict[str, Any]:
        """Return a candidate as a trial in hyperopt's format."""
        draws = self._space.draws_of(self._candidates[number])
        return {
            "tid": number,
            "state": 2,  # done
            "spec": None,
            "result": {"status": "ok", "loss": self._losses[number]},
            "misc": {
                "tid": number,
                "cmd": None,
                "workdir": None,
                "idxs": {name: [number] for name in draws},
                "vals": {name: [draw] for name, draw in draws.items()},
            },
            "exp_key": None,
            "owner": None,
            "version": 0,
            "book_time": None,
            "refresh_time": None,
        }
