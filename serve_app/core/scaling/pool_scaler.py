"""Autoscaling of one pool: its need for replicas, from the load of its engines and its backlog."""

import math
from collections import deque
from dataclasses import dataclass

from serve_app.core.scaling.observation import PoolView
from serve_app.core.scaling.settings import AutoscalingSettings, ScaledPool
from serve_app.core.scaling.speed import PoolSpeed
from serve_app.core.scaling.start_time import StartTime

# Short enough to follow a step within half a minute, long enough for dozens of requests of a small pool.
_LOAD_TIME_CONSTANT_S = 20.0
# A burst looks like a high rate of arrivals until the mean has forgotten it. So the load beyond the ready
# engines counts only as far as it doubles within this time, and the queued work counts in full.
_DOUBLING_S = 30.0
# A backlog that drains within this time is no reason for another engine, even if that starts immediately.
_MIN_HORIZON_S = 30.0
# Tolerance for rounding errors of a need that is a whole number.
_ROUNDING = 1e-6
_UNBOUNDED = AutoscalingSettings(min_replicas=0, max_replicas=1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDecision:
    """The replicas that a pool should have, and the reason.

    Attributes:
        needed: the need before rounding, delays, bounds and the GPU budget.
        ready: replicas that accept requests now.
        load: engines that the arriving work fills, limited in its growth.
        backlog_s: queued work in seconds of one engine.
        may_shrink: False while replicas beyond this number must not be stopped.
    """

    replicas: int
    needed: float
    reason: str
    ready: int
    load: float = 0.0
    backlog_s: float = 0.0
    oldest_wait_s: float = 0.0
    start_s: float = 0.0
    may_shrink: bool = True


class _RecentLoad:
    """The arrival rate of work in engines that it fills, as an exponential mean.

    A damped trend and a seasonal model of the arrivals were compared with it at commit 0bce4ea.
    """

    def __init__(self, time_constant_s: float) -> None:
        self._time_constant_s = time_constant_s
        self.engines = 0.0

    def observe(self, engine_s: float, elapsed_s: float) -> None:
        """Add the work that has arrived since the last call, in seconds of an engine."""
        if elapsed_s > 0:
            share = -math.expm1(-elapsed_s / self._time_constant_s)
            self.engines += share * (engine_s / elapsed_s - self.engines)


class PoolScaler:
    """Decides the number of replicas of one pool."""

    def __init__(self, pool: ScaledPool, load_time_constant_s: float = _LOAD_TIME_CONSTANT_S) -> None:
        self._settings = pool.autoscaling or _UNBOUNDED
        self._load = _RecentLoad(load_time_constant_s)
        # The part of the load that counts, see `_DOUBLING_S`.
        self._lasting = 0.0
        self._speed = PoolSpeed()
        self.start_time = StartTime()
        # Needs of the last `downscale_delay_s`, each greater than all later ones.
        self._needs: deque[tuple[float, int]] = deque()
        self._last: PoolView | None = None
        self._at = self._started_at = -math.inf
        # Maximum number of ready replicas observed while it settles.
        self._most_ready = 0
        self.desired: int | None = None

    def change(self, pool: ScaledPool) -> None:
        """Apply other bounds from now on."""
        self._settings = pool.autoscaling or _UNBOUNDED

    def decide(self, view: PoolView, now: float) -> PoolDecision:
        """Return the replicas that the pool should have. `now` must not decrease."""
        if self._last is None:
            self._started_at = now
        self._learn(view, now)
        needed, reason, load, backlog_s = self._need(view)
        replicas = self._within_bounds(view, math.ceil(needed - _ROUNDING), now)
        if replicas > math.ceil(needed - _ROUNDING):
            window_s = self._settings.downscale_delay_s
            reason = f"{reason}; raised to the minimum or the need of the last {window_s:g} s"
        self._last, self._at = view, now
        return PoolDecision(
            replicas=replicas,
            needed=needed,
            reason=reason,
            ready=view.ready,
            load=load,
            backlog_s=backlog_s,
            oldest_wait_s=view.oldest_wait_s,
            start_s=self.start_time.seconds,
            may_shrink=not self._is_settling(now),
        )

    def settle(self, replicas: int, now: float) -> None:
        """Record the number of replicas to be ordered, which the GPU budget may have reduced."""
        if self.desired is not None:
            self.start_time.on_order(replicas - self.desired, now)
        self.desired = replicas

    def _learn(self, view: PoolView, now: float) -> None:
        speed, last = self._speed, self._last
        if view.ready:
            speed.slots = view.slots / view.ready
        if view.stated is not None:
            speed.state(*view.stated)
        speed.set_prefill(view.prefill_token_s)
        self.start_time.on_ready(view.replica_ids, now)
        if last is None or now <= self._at:
            return
        elapsed_s = now - self._at
        # A new scheduler counts from zero again.
        prefill_tokens = max(0, view.arrived_prefill_tokens - last.arrived_prefill_tokens)
        output_tokens = max(0, view.arrived_output_tokens - last.arrived_output_tokens)
        token_s = view.prefill_token_s or 0.0
        prefill_ratio = prefill_tokens * token_s / (elapsed_s * max(1, view.ready))
        for sequences, tpot_s in view.reports:
            speed.observe(sequences, tpot_s, prefill_ratio)
        known = speed.now(view.tpot_limit_s)
        engine_s = 0.0 if known is None else known.seconds(prefill_tokens, output_tokens)
        self._load.observe(engine_s, elapsed_s)
        growth = 2.0 ** min(1.0, elapsed_s / _DOUBLING_S)
        self._lasting = min(self._load.engines, max(1.0, view.ready, self._lasting) * growth)

    def _need(self, view: PoolView) -> tuple[float, str, float, float]:
        speed = self._speed.now(view.tpot_limit_s)
        start_s = self.start_time.seconds
        if speed is None:
            needed, reason, load, backlog_s = (*self._by_slots(view), 0.0, 0.0)
        else:
            load = self._lasting
            backlog_s = speed.seconds(view.waiting_prefill_tokens, view.waiting_output_tokens)
            needed, reason = self._by_work(view, load, backlog_s, start_s)
        coming = max(0, (self.desired or 0) - view.ready)
        if view.oldest_wait_s > self._settings.target_wait_s and not coming and needed <= view.ready:
            needed, reason = view.ready + 1.0, f"a request has waited for {view.oldest_wait_s:.1f} s"
        if view.has_demand or self._arrived(view):
            # Any work at all requires one engine.
            needed = max(needed, _ROUNDING * 2)
        else:
            needed, reason = 0.0, "no requests"
        return needed, reason, load, backlog_s

    def _by_work(self, view: PoolView, load: float, backlog_s: float, start_s: float) -> tuple[float, str]:
        horizon_s = max(_MIN_HORIZON_S, start_s)
        return max(
            (load / self._settings.target_utilization_ratio, f"arrivals fill {load:.2f} engines"),
            (
                load + backlog_s / horizon_s,
                f"the backlog is {backlog_s:.1f} engine-seconds, and arrivals fill {load:.2f} engines",
            ),
            (view.full_ratio * view.ready, f"{view.full_ratio:.0%} of its slots or KV cache are in use"),
        )

    def _by_slots(self, view: PoolView) -> tuple[float, str]:
        """Return the need by the number of requests, for an unknown speed."""
        requests = view.in_flight + view.waiting_requests
        slots = max(1.0, self._speed.slots)
        if not view.ready and self._speed.slots < 1:
            return float(min(requests, 1)), f"{requests} requests, and no engine has started yet"
        needed = requests / (slots * self._settings.target_utilization_ratio)
        return needed, f"{requests} requests for {slots:.0f} slots each; engine speed unknown"

    def _arrived(self, view: PoolView) -> bool:
        return self._last is not None and view.arrived_requests > self._last.arrived_requests

    def _within_bounds(self, view: PoolView, needed: int, now: float) -> int:
        settings, needs = self._settings, self._needs
        while needs and needs[-1][1] <= needed:
            needs.pop()
        needs.append((now, needed))
        while needs[0][0] < now - settings.downscale_delay_s:
            needs.popleft()
        replicas = max(needs[0][1], settings.min_replicas)
        if self._is_settling(now):
            # Running replicas were started for a reason, and one late report must not stop them.
            self._most_ready = max(self._most_ready, view.ready)
            replicas = max(replicas, self._most_ready)
        return min(replicas, settings.max_replicas)

    def _is_settling(self, now: float) -> bool:
        return now - self._started_at < self._settings.downscale_delay_s
