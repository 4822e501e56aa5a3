"""What is played."""

from typing import Annotated

from serve_app.settings_base import NOT_NEGATIVE, POSITIVE, at_least, settings


@settings
class CostSettings:
    """The first part, on light servers.

    Attributes:
        clients: that send one request after the other; each way has as many.
        requests: of each way in each round.
        rounds: in each, the three ways take turns, and another one is first.
        idle_s: for how long the use of idle processes is measured.
    """

    servers: Annotated[int, at_least(1)]
    clients: Annotated[int, at_least(1)]
    requests: Annotated[int, at_least(1)]
    rounds: Annotated[int, at_least(1)]
    idle_s: Annotated[float, POSITIVE]


@settings
class ForecastSettings:
    """The second part, on emulated engines.

    Attributes:
        observed_s: for how long requests pass, and the twin learns; then all are scheduled for `scheduled_s`.
        settle_s: the begin of either time, which is not measured.
    """

    engines: Annotated[int, at_least(1)]
    profile: str
    speed_up: Annotated[float, POSITIVE]
    trace: str
    rate_per_s: Annotated[float, POSITIVE]
    observed_s: Annotated[float, POSITIVE]
    scheduled_s: Annotated[float, POSITIVE]
    settle_s: Annotated[float, NOT_NEGATIVE]


@settings
class ObserveCostSettings:
    """Both parts, of one application."""

    cost: CostSettings
    forecast: ForecastSettings
