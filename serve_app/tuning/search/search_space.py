"""The search space: parameters with bounds and scales, and the prior around their current values.

Each parameter has a short name, the path of its setting, bounds and a scale. The scale lays its range on
[0, 1]: the *unit* in which steps are measured and distances compared. a_u and a_f have values around 1e-3,
while a queue count goes into the tens; in units they compare.

The optimiser draws uniformly from another [0, 1], the *draw*. Between draw and unit lies the prior: `spread`
of its mass is uniform, the rest rises towards the current value (a triangle). So a search begins near the
values in force, and still reaches every corner, as it must when the values in force are bad. With c the unit
of the current value and s the spread, for u up to c:

    F(u) = s * u + (1 - s) * u^2 / c          and, mirrored, above c

so that F(c) = c, and its inverse is a square root.

The parameters themselves stand in `tunable`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from serve_app.errors import SettingsError

Values = Mapping[str, float]
"""Values of parameters by short name."""

DEFAULT_SPREAD = 0.3
"""At it, the prior is nearly six times as dense near the current value as far from it."""

_DIGITS = 4
"""Significant digits of a value: more only make settings hard to read."""


class Scale(StrEnum):
    """How a range is laid on [0, 1]."""

    LINEAR = "linear"
    LOG = "log"


class SettingPart(StrEnum):
    """The part of a model's settings that a parameter belongs to, by its path."""

    SCHEDULER = "scheduler"
    PARTITION = "tuner.strategic.refine_and_prune"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One setting that may be tuned.

    Attributes:
        name: short, unique.
        path: of the setting below its part; for the scheduler as `simulate --set` takes it.
        low, high: bounds, both inclusive.
        scale: linear or logarithmic.
        integer: whole numbers only.
    """

    name: str
    path: str
    low: float
    high: float
    scale: Scale = Scale.LINEAR
    integer: bool = False
    part: SettingPart = SettingPart.SCHEDULER

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"{self.name}: bounds must be in order, got {self.low} and {self.high}")
        if self.scale is Scale.LOG and self.low <= 0:
            raise ValueError(f"{self.name}: a logarithmic scale begins above 0, got {self.low}")
        if self.integer and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise ValueError(f"{self.name}: bounds must be whole numbers, got {self.low} and {self.high}")

    @property
    def model_path(self) -> str:
        """The path of the setting in the settings of a model."""
        return f"{self.part.value}.{self.path}"

    def clipped(self, value: float) -> float:
        """The nearest value that the parameter can have."""
        return self._rounded(min(max(value, self.low), self.high))

    def unit(self, value: float) -> float:
        """Where a value lies between the bounds, 0 to 1; beyond them, at the nearer one."""
        at, low, high = self._scaled(min(max(value, self.low), self.high)), *self._ends()
        return (at - low) / (high - low)

    def at_unit(self, unit: float) -> float:
        """The value at a unit, the inverse of `unit`."""
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
        # Rounding must not lead out of the bounds.
        return min(max(float(f"{value:.{_DIGITS}g}"), self.low), self.high)


class SearchSpace:
    """Parameters with the values in force.

    Args:
        current: a value for each parameter; for one beyond the bounds, the search begins at the bound.
        spread: share of the prior's mass that is uniform.

    Raises:
        SettingsError: there is nothing to tune, or a value is missing or no number.
    """

    def __init__(
        self, parameters: Sequence[Parameter], current: Values, *, spread: float = DEFAULT_SPREAD
    ) -> None:
        if not parameters:
            raise SettingsError("there is nothing to tune: name at least one parameter")
        if not 0 < spread <= 1:
            raise SettingsError(f"spread must be above 0 and at most 1, got {spread}")
        self._parameters = {each.name: each for each in parameters}
        if len(self._parameters) != len(parameters):
            raise SettingsError("two parameters have the same name")
        self.current = self.checked(current)
        self._spread = spread

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
        """The names of all parameters, in order."""
        return tuple(self._parameters)

    def checked(self, values: Values) -> dict[str, float]:
        """The values unchanged, in the order of the parameters.

        Raises:
            SettingsError: one is missing, unknown or no finite number.
        """
        if unknown := set(values) - set(self._parameters):
            raise SettingsError(
                f"no parameter {', '.join(sorted(unknown))}: there are {', '.join(self.names)}"
            )
        for name in self.names:
            value = values.get(name)
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise SettingsError(f"{name} must be a finite number, got {value!r}")
        return {name: values[name] for name in self.names}

    def clipped(self, values: Values) -> dict[str, float]:
        """Each value within its bounds.

        Raises:
            SettingsError: as `checked`.
        """
        return {name: self[name].clipped(value) for name, value in self.checked(values).items()}

    def is_within(self, values: Values) -> bool:
        """Whether every value is one that its parameter can have."""
        return self.clipped(values) == self.checked(values)

    def from_draws(self, draws: Mapping[str, float]) -> dict[str, float]:
        """The values that uniform draws from [0, 1] lead to."""
        return {
            name: self[name].at_unit(_quantile(draws[name], self._centre(name), self._spread))
            for name in self.names
        }

    def draws_of(self, values: Values) -> dict[str, float]:
        """The draws that lead to these values; beyond the bounds, to the bound."""
        return {
            name: _distribution(self[name].unit(value), self._centre(name), self._spread)
            for name, value in self.checked(values).items()
        }

    def step(self, start: Values, towards: Values, largest: float) -> dict[str, float]:
        """A step towards other values, in which no parameter moves by more than `largest` units.

        Each parameter goes the same share of its way, or as near to it as whole numbers allow. A parameter of
        whole numbers moves by at least 1, or it could never move at all. A start beyond the bounds counts as
        the bound.

        Args:
            largest: above 0, at most 1.
        """
        begin, end = self.clipped(start), self.clipped(towards)
        distances = {
            name: abs(self[name].unit(end[name]) - self[name].unit(begin[name])) for name in self.names
        }
        farthest = max(distances.values())
        if farthest <= largest:
            return end
        share = largest / farthest
        return {name: _between(self[name], begin[name], end[name], share) for name in self.names}

    def _centre(self, name: str) -> float:
        return self[name].unit(self.current[name])


def _between(parameter: Parameter, begin: float, end: float, share: float) -> float:
    """The value after that share of the way, never further."""
    if begin == end:
        return begin
    first, last = parameter.unit(begin), parameter.unit(end)
    value = parameter.at_unit(first + share * (last - first))
    if not parameter.integer:
        return value
    # Rounding to the nearest whole number may have gone too far, or nowhere.
    limit = share * abs(last - first)
    direction = 1 if end > begin else -1
    while value != begin and abs(parameter.unit(value) - first) > limit:
        value -= direction
    return begin + direction if value == begin else value


def _distribution(unit: float, centre: float, spread: float) -> float:
    """The prior's F at a unit."""
    if unit <= centre:
        return spread * unit + (1 - spread) * unit**2 / centre if centre > 0 else 0.0
    return 1.0 - _distribution(1.0 - unit, 1.0 - centre, spread)


def _quantile(draw: float, centre: float, spread: float) -> float:
    """The inverse of F."""
    if draw <= centre:
        if spread == 1 or centre == 0:
            return draw
        root = math.sqrt(spread**2 + 4 * (1 - spread) * draw / centre)
        return centre * (root - spread) / (2 * (1 - spread))
    return 1.0 - _quantile(1.0 - draw, 1.0 - centre, spread)
