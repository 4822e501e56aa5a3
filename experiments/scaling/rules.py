"""Rules that scale pools: ours with three forecasts, Ray Serve's default policy, and a fleet that stays."""

import math
from collections import deque
from collections.abc import Callable, Mapping

from serve_app.scaling import AutoscalingSettings, FleetScaler, ScaledPool, ScalingSettings
from serve_app.scaling.forecast import LoadForecast, RecentLoad
from serve_app.scheduling import Scheduler
from serve_app.simulation.scaled import ScalingRule, WorkRule


class TrendLoad:
    """The recent load and its recent slope go on, damped (Gardner and McKenzie, 1985)."""

    def __init__(self) -> None:
        self._level, self._slope = RecentLoad(), 0.0

    def observe(self, engine_s: float, elapsed_s: float) -> None:
        """Take in the work that has arrived since the last call, in seconds of an engine."""
        before = self._level.load(0.0)
        self._level.observe(engine_s, elapsed_s)
        share = -math.expm1(-elapsed_s / 60.0)
        self._slope += share * ((self._level.load(0.0) - before) / elapsed_s - self._slope)

    def load(self, horizon_s: float) -> float:
        """The highest load until the horizon; the slope fades with a time constant of two minutes."""
        ahead_s = 120.0 * -math.expm1(-horizon_s / 120.0)
        return self._level.load(0.0) + max(0.0, self._slope * ahead_s)


class SeasonalLoad:
    """The highest load of the same stretch of the last season, at today's level, or the recent one if more.

    Args:
        season_s: after which the arrivals repeat themselves.
    """

    def __init__(self, season_s: float) -> None:
        self._season_s = season_s
        self._recent = RecentLoad()
        self._smooth = RecentLoad(60.0)
        self._now = 0.0
        self._past: deque[tuple[float, float]] = deque()

    def observe(self, engine_s: float, elapsed_s: float) -> None:
        """Take in the work that has arrived since the last call, in seconds of an engine."""
        self._now += elapsed_s
        self._recent.observe(engine_s, elapsed_s)
        self._smooth.observe(engine_s, elapsed_s)
        if not self._past or self._now - self._past[-1][0] >= 10.0:
            self._past.append((self._now, self._smooth.load(0.0)))
        while self._past[0][0] < self._now - self._season_s - 10.0:
            self._past.popleft()

    def load(self, horizon_s: float) -> float:
        """The highest load until the horizon."""
        recent = self._recent.load(0.0)
        begin = self._now - self._season_s
        if self._past[0][0] > begin + 10.0:
            return recent
        stretch = [load for at, load in self._past if begin <= at <= begin + horizon_s]
        return max([recent, *stretch])


class Fixed:
    """The fleet stays as it begins."""

    def targets(self, _scheduler: Scheduler, _now: float) -> Mapping[str, int]:
        """Nothing changes."""
        return {}


class ServeDefault:
    """Ray Serve's default policy, with its default delays and a target that is half of an engine's batch.

    Replicas of a pool follow the requests that they hold and that wait for it, over the target. A decision
    must hold for `up_s` or `down_s` before it is carried out.
    """

    def __init__(self, target: float, bounds: AutoscalingSettings, first: Mapping[str, int]) -> None:
        self._target, self._bounds = target, bounds
        self._now = dict(first)
        self._since: dict[str, tuple[int, float]] = {}
        self._up_s, self._down_s = 30.0, 600.0

    def targets(self, scheduler: Scheduler, now: float) -> Mapping[str, int]:
        """As many as hold the requests at the target."""
        for pool, current in self._now.items():
            held = sum(state.in_flight for state in scheduler.ledger if state.spec.pool == pool)
            waiting = sum(work.requests for pools, work in scheduler.queue.work.items() if pools[0] == pool)
            wanted = math.ceil((held + waiting) / self._target)
            wanted = min(max(wanted, self._bounds.min_replicas), self._bounds.max_replicas)
            direction = (wanted > current) - (wanted < current)
            since = self._since.get(pool, (0, now))
            if since[0] != direction:
                since = self._since[pool] = (direction, now)
            delay_s = self._up_s if direction > 0 else self._down_s
            if direction and now - since[1] >= delay_s:
                self._now[pool] = wanted
                self._since[pool] = (0, now)
        return self._now


def forecasts(season_s: float) -> Mapping[str, Callable[[], LoadForecast]]:
    """Ours, by the name of the forecast."""
    return {
        "work, reacting": RecentLoad,
        "work, trend": TrendLoad,
        "work, season": lambda: SeasonalLoad(season_s),
    }


def work_rule(
    pools: tuple[str, ...], bounds: AutoscalingSettings, forecast: Callable[[], LoadForecast]
) -> ScalingRule:
    """The product's own rule with a forecast."""
    settings = ScalingSettings(pools={pool: ScaledPool(autoscaling=bounds) for pool in pools})
    return WorkRule(FleetScaler(settings, forecast))
