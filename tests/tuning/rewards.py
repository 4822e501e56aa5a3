"""Rewards, small search spaces, studies and search results for tuner tests."""

import math
from collections.abc import Callable

from serve_app.tuning.objective import Reward
from serve_app.tuning.search_space import Parameter, Scale, SearchSpace, Values
from serve_app.tuning.study import Comparison, Finding

PARAMETERS = (
    Parameter(name="a", path="ewsjf.weights.a_u", low=-1.0, high=1.0),
    Parameter(name="b", path="ewsjf.weights.b_u", low=0.01, high=100.0, scale=Scale.LOG),
    Parameter(name="n", path="backpressure.target_waiting", low=1, high=16, scale=Scale.LOG, integer=True),
)
CURRENT = {"a": 0.9, "b": 50.0, "n": 15}
BEST = {"a": -0.3, "b": 0.3, "n": 3}

Objective = Callable[[Values, int], float | None]


def space(current: Values | None = None) -> SearchSpace:
    return SearchSpace(PARAMETERS, CURRENT if current is None else current)


def bowl(values: Values, window: int) -> float:
    """Return a reward with its optimum at `BEST`, and noise that candidates of a window share in part."""
    units = [each.unit(values[each.name]) for each in PARAMETERS]
    best = [each.unit(BEST[each.name]) for each in PARAMETERS]
    miss = sum((unit - goal) ** 2 for unit, goal in zip(units, best, strict=True))
    own = math.sin(1_000.0 * window + sum(units))
    return -miss + 0.5 * math.sin(window) + 0.01 * own


def rewarded(value: float | None) -> Reward:
    return Reward(value=value, requests=100, reason="" if value is not None else "nothing was measured")


def found(values: Values, *, confident: bool = True) -> Finding:
    """Return a search result with these values, for any traffic."""
    gain = Comparison(mean=0.1, low=0.05, high=0.15, evidence=50.0, windows=4)
    return Finding(
        best=values,
        confirmation=gain,
        confident=confident,
        reason="for the test",
        candidates=2,
    )
