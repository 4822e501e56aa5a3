"""Autoscaling: the number of replicas of each pool, within a budget of GPUs.

- `FleetScaler`: the replicas of all pools of a model, decided once per second.
- `PoolScaler`: the need of one pool for replicas, from the load of its engines and its backlog.
- `share_gpus`: distributes the GPUs if the pools need more than there are.
- `StartTime`: the start time of engines, learned from orders and arrivals of replicas.
- `observe`: the load of each pool, as the autoscaler sees it (`PoolView`).
- `PoolSpeed`: seconds of an engine per prompt and output token, learned from reports.
- `ScalingSettings`: the bounds of each pool, and the GPU budget of all pools of a model.

`share_gpus`. Every pool first gets its minimum. Then pools without replicas get one. After that the pool with
the highest need per replica gets the next one, until none fits or none is needed. That balances the shortage.
Among equal pools the one listed first is served, which is the one for short requests.

`PoolSpeed`. A full engine decodes as many answers at a time as it has slots, so a token of an answer costs it

    output_token_s = TPOT at `slots` sequences / slots

TPOT is linear in the number of running sequences, as in `engines.model.step_time`. It is fitted by least
squares over the replicas' reports, of which about the last few hundred count. The effect of prefills on a
reported TPOT is removed, because prompts are counted separately. The prior is what the engines report of a
full batch when they join. If neither is known, the speed is unknown.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from serve_app.core import Scheduler
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.prefill_cost import DecayingLine
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.settings_base import (
    ADVANCED,
    INTERNAL,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    at_least,
    settings,
)
from serve_app.request import PriorityClass

# A report's weight after n more is `_DECAY ** n`.
_DECAY = 0.998
# Weight of the values that engines report when they join, in reports.
_STATED_WEIGHT = 2.0
# An engine almost filled by prefills gives no information about decoding.
_MAX_PREFILL_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """The cost of a token on a full engine.

    Attributes:
        prefill_token_s: engine seconds per prompt token.
        output_token_s: engine seconds per output token.
    """

    prefill_token_s: float
    output_token_s: float

    def seconds(self, prefill_tokens: float, output_tokens: float) -> float:
        """Return the seconds of one engine for this work."""
        return prefill_tokens * self.prefill_token_s + output_tokens * self.output_token_s


class DecodeLine(DecayingLine):
    """TPOT as a linear function of the number of sequences."""

    def observe(self, sequences: float, tpot_s: float, weight: float = 1.0) -> None:
        """Add one report of a busy engine."""
        self.add(sequences, tpot_s, weight, decay=_DECAY)

    def tpot_s(self, sequences: float) -> float | None:
        """Return the seconds per token with `sequences` sequences, or None before any report."""
        weight, x, y, _, _ = self.sums
        if not weight:
            return None
        # More sequences never make a step shorter, and no step has a negative duration.
        slope = min(max(self.slope() or 0.0, 0.0), y / x if x else 0.0)
        return y / weight + slope * (sequences - x / weight)


class PoolSpeed:
    """The speed of the engines of one pool.

    Attributes:
        slots: sequences on a full replica; 0 before the first replica.
    """

    def __init__(self) -> None:
        self._line = DecodeLine()
        self._stated: tuple[float, float] | None = None
        self._prefill_token_s: float | None = None
        self.slots = 0.0

    def state(self, sequences: int, tpot_s: float) -> None:
        """Add what its engines report of a full batch when they join. Repeated values count once."""
        if self._stated != (sequences, tpot_s):
            self._stated = (sequences, tpot_s)
            self._line.observe(sequences, tpot_s, _STATED_WEIGHT)

    def observe(self, sequences: int, tpot_s: float, prefill_ratio: float) -> None:
        """Add one report.

        Args:
            prefill_ratio: share of the engine's time that prefills used since the previous report.
        """
        if sequences > 0:
            self._line.observe(sequences, tpot_s * (1.0 - min(prefill_ratio, _MAX_PREFILL_RATIO)))

    def set_prefill(self, token_s: float | None) -> None:
        """Set the seconds per prompt token, if they are known."""
        self._prefill_token_s = token_s if token_s is not None else self._prefill_token_s

    def now(self, tpot_limit_s: float | None) -> EngineSpeed | None:
        """Return the current speed, or None while it is unknown.

        Args:
            tpot_limit_s: TPOT above which an engine receives no more requests, which may leave slots empty.
        """
        if self._prefill_token_s is None or self.slots < 1:
            return None
        full = self._line.tpot_s(self.slots)
        if full is None:
            return None
        slots = self._within(self.slots, tpot_limit_s)
        tpot_s = self._line.tpot_s(slots) or full
        return EngineSpeed(self._prefill_token_s, tpot_s / slots)

    def _within(self, slots: float, limit_s: float | None) -> float:
        """Return the maximum number of sequences whose TPOT is within the limit, at least one."""
        if limit_s is None or (self._line.tpot_s(slots) or 0.0) <= limit_s:
            return slots
        single, full = self._line.tpot_s(1.0) or 0.0, self._line.tpot_s(slots) or 0.0
        if full <= single:
            return slots
        return max(1.0, 1.0 + (slots - 1.0) * (limit_s - single) / (full - single))


# Prefills after which their learned cost no longer depends mostly on its prior.
_LEARNED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """The state of one pool at one time. Work is that of requests with this home pool above the batch class.

    Attributes:
        ready: replicas that accept requests.
        arrived_requests, arrived_prefill_tokens, arrived_output_tokens: totals since the scheduler started.
        waiting_requests, waiting_prefill_tokens, waiting_output_tokens: work in the queue.
        has_demand: whether a request of any class waits for the pool or runs on it.
        oldest_wait_s: longest queue time of heads that an additional replica could serve.
        in_flight: requests on its replicas, with any home pool.
        slots: sequences that its ready replicas run when full, limited by batch or KV cache.
        full_ratio: share of the slots or of the KV cache in use, whichever is higher (0-1).
        prefill_token_s: seconds per prompt token; None while unknown.
        stated: sequences of a full batch and the TPOT with them, as its engines report them when they join.
        reports: sequences and TPOT of the replicas that have reported both.
        tpot_limit_s: TPOT above which its engines receive no more requests; None for no limit.
    """

    ready: int
    replica_ids: tuple[str, ...] = ()
    arrived_requests: int = 0
    arrived_prefill_tokens: int = 0
    arrived_output_tokens: int = 0
    waiting_requests: int = 0
    waiting_prefill_tokens: int = 0
    waiting_output_tokens: int = 0
    has_demand: bool = False
    oldest_wait_s: float = 0.0
    in_flight: int = 0
    slots: float = 0.0
    full_ratio: float = 0.0
    prefill_token_s: float | None = None
    stated: tuple[int, float] | None = None
    reports: tuple[tuple[int, float], ...] = ()
    tpot_limit_s: float | None = None


def observe(scheduler: Scheduler, pools: Iterable[str], now: float) -> dict[str, PoolView]:
    """Return the state of the scheduler's pools at `now`."""
    oldest = _oldest_waits(scheduler, now)
    demanded = {pools[0] for pools, work in scheduler.queue.work.items() if work.requests}
    demanded |= {pool for pool, work in scheduler.queue.non_batch_work.items() if work.requests}
    return {pool: _view(scheduler, pool, oldest.get(pool, 0.0), pool in demanded) for pool in pools}


def _view(scheduler: Scheduler, pool: str, oldest_wait_s: float, waits: bool) -> PoolView:
    members = scheduler.ledger.of_pool(pool)
    ready = [state for state in members if state.is_alive]
    waiting, arrived = scheduler.queue.non_batch_work[pool], scheduler.arrived[pool]
    in_flight = sum(state.in_flight for state in members)
    mean_tokens = _mean_tokens(ready, waiting.tokens, waiting.requests)
    slots = sum(_slots(state, mean_tokens) for state in ready)
    busy = sum(state.in_flight for state in ready)
    kv_tokens = sum(state.kv_budget for state in ready)
    peak = sum(state.peak_tokens for state in ready)
    return PoolView(
        ready=len(ready),
        replica_ids=tuple(state.spec.replica_id for state in ready),
        arrived_requests=arrived.requests,
        arrived_prefill_tokens=arrived.prefill_tokens,
        arrived_output_tokens=arrived.output_tokens,
        waiting_requests=waiting.requests,
        waiting_prefill_tokens=waiting.prompt_tokens,
        waiting_output_tokens=waiting.tokens - waiting.prompt_tokens,
        has_demand=waits or in_flight > 0,
        oldest_wait_s=oldest_wait_s,
        in_flight=in_flight,
        slots=slots,
        # An engine has a few queued requests beyond its batch, which are no reason for another engine.
        full_ratio=min(1.0, max(busy / slots if slots else 0.0, peak / kv_tokens if kv_tokens else 0.0)),
        prefill_token_s=_prefill_token_s(scheduler, pool, ready),
        stated=_stated(ready),
        reports=tuple(_reports(ready)),
        # The current value, because a tuner may change it.
        tpot_limit_s=scheduler.settings.effective_backpressure.tpot_gate_s,
    )


def _oldest_waits(scheduler: Scheduler, now: float) -> dict[str, float]:
    oldest: dict[str, float] = {}
    for head, _ in scheduler.queue.sub_queue_heads():
        home, wait_s = head.pools[0], now - head.request.arrived_at
        if head.request.priority is PriorityClass.BATCH:
            # It waits for idle capacity, but not for its floor.
            wait_s = min(wait_s, scheduler.queue.floors.longest_behind_s(head.request, now))
        if wait_s > oldest.get(home, 0.0) and _can_scale_out_help(scheduler, head, home):
            oldest[home] = wait_s
    return oldest


def _can_scale_out_help(scheduler: Scheduler, head: ScheduledRequest, pool: str) -> bool:
    """Return whether an additional replica of a pool could serve a request.

    A bound request can only use one replica. A LoRA adapter that was loaded into some engines is not loaded
    in a new one.
    """
    destination = head.request.destination
    if destination.replica_id is not None:
        return False
    return destination.adapter is None or all(
        destination.adapter in state.spec.adapters
        for state in scheduler.ledger.of_pool(pool)
        if state.is_alive
    )


def _mean_tokens(ready: list[ReplicaState], waiting_tokens: int, waiting_requests: int) -> float:
    """Return the mean KV tokens of a running or queued request; 1 if there is none."""
    requests = waiting_requests + sum(state.in_flight for state in ready)
    tokens = waiting_tokens + sum(state.peak_tokens for state in ready)
    return max(1.0, tokens / requests) if requests else 1.0


def _slots(state: ReplicaState, mean_tokens: float) -> float:
    return max(1.0, min(float(state.likely_num_seqs), state.kv_budget / mean_tokens))


def _prefill_token_s(scheduler: Scheduler, pool: str, ready: list[ReplicaState]) -> float | None:
    stated = [state.spec.prefill_token_s for state in ready if state.spec.prefill_token_s is not None]
    if stated:
        return sum(stated) / len(stated)
    cost = scheduler.prefill_costs.of(pool)
    return cost.per_token_s if cost.observations >= _LEARNED else None


def _stated(ready: list[ReplicaState]) -> tuple[int, float] | None:
    for state in ready:
        if state.spec.tpot_s is not None and state.spec.max_num_seqs is not None:
            return state.spec.max_num_seqs, state.spec.tpot_s
    return None


def _reports(ready: list[ReplicaState]) -> Iterable[tuple[int, float]]:
    for state in ready:
        report = state.report
        if report is not None and report.running and report.tpot_s is not None:
            yield report.running, report.tpot_s


@settings(block="autoscaling")
class AutoscalingSettings:
    """Bounds of one pool's autoscaling. The number of replicas within them follows from the pool's work."""

    # 0 stops all engines of a pool without requests. The next request then waits for an engine to start.
    min_replicas: Annotated[int, at_least(0)] = 1
    # Set it above `min_replicas` to let the pool grow.
    max_replicas: Annotated[int, at_least(1)] = 1
    # Replicas at deployment; `min_replicas` by default.
    initial_replicas: Annotated[int | None, at_least(0), ADVANCED] = None
    # Seconds for which fewer replicas must have been enough before some are stopped. Another start costs more
    # than some idle minutes.
    downscale_delay_s: Annotated[float, NOT_NEGATIVE, ADVANCED] = 300.0
    # Share of a replica's measured speed that the mean arrivals may use. The rest is headroom for bursts
    # while another engine starts. A higher share saves replicas and lengthens the tail of TTFT.
    target_utilization_ratio: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.7
    # Queue time of a request above the batch class that adds a replica, regardless of the measured speeds.
    target_wait_s: Annotated[float, POSITIVE, INTERNAL] = 5.0

    def __post_init__(self) -> None:
        if not self.min_replicas <= self.first_replicas <= self.max_replicas:
            raise ValueError(
                "autoscaling: replicas must satisfy 0 <= min <= initial <= max, "
                f"got min {self.min_replicas}, initial {self.initial_replicas}, max {self.max_replicas}"
            )

    @property
    def first_replicas(self) -> int:
        """Replicas at deployment."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledPool:
    """The scaling settings of one pool.

    Attributes:
        autoscaling: its bounds; None for a pool that is not autoscaled here: then its need is not bounded.
        replicas: its fixed number of replicas, if it is not scaled at all.
    """

    autoscaling: AutoscalingSettings | None = None
    replicas: int | None = None
    gpus: float = 0.0

    @property
    def least(self) -> int:
        """Minimum number of replicas."""
        return self.autoscaling.min_replicas if self.autoscaling is not None else self.replicas or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSettings:
    """The scaling settings of all pools of a model.

    Attributes:
        gpu_budget: GPUs that they may use together; None for no limit.
    """

    pools: Mapping[str, ScaledPool] = field(default_factory=dict)
    gpu_budget: float | None = None

    def __post_init__(self) -> None:
        least = sum(pool.gpus * pool.least for pool in self.pools.values())
        if self.gpu_budget is not None and least > self.gpu_budget:
            raise ValueError(
                f"gpu_budget of {self.gpu_budget:g} is below the {least:g} GPUs that its pools have "
                "at least: raise it, or lower their min_replicas and replicas"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNeed:
    """The need of one pool.

    Attributes:
        needed: the need before rounding, delays and bounds.
        least: replicas that it has in any case.
    """

    replicas: int
    needed: float
    least: int
    gpus: float


def share_gpus(needs: Mapping[str, PoolNeed], budget: float | None) -> dict[str, int]:
    """Return the replicas of each pool within the budget; without a budget, all that they need."""
    if budget is None or sum(need.replicas * need.gpus for need in needs.values()) <= budget:
        return {pool: need.replicas for pool, need in needs.items()}
    allocated = {pool: min(need.replicas, need.least) for pool, need in needs.items()}
    left = budget - sum(needs[pool].gpus * count for pool, count in allocated.items())
    while pool := _next(needs, allocated, left):
        allocated[pool] += 1
        left -= needs[pool].gpus
    return allocated


def _next(needs: Mapping[str, PoolNeed], allocated: Mapping[str, int], left: float) -> str:
    """Return the pool that gets the next replica, or an empty string if none fits or is needed."""
    candidates = [
        pool for pool, need in needs.items() if allocated[pool] < need.replicas and need.gpus <= left + 1e-9
    ]
    # A pool without replicas precedes the others.
    return max(
        candidates,
        key=lambda pool: (allocated[pool] == 0, needs[pool].needed / max(1, allocated[pool])),
        default="",
    )


# Weight of one start in the mean.
_WEIGHT = 0.3
# The prior: a small model on an existing node.
_PRIOR_S = 60.0
# Replicas remembered after they have left; many more than a pool has at a time.
_KNOWN = 10_000


class StartTime:
    """The mean time from an order to a replica that accepts requests.

    A replica counts once. One that reconnects, also to another scheduler, has not started.
    """

    def __init__(self) -> None:
        self.seconds = _PRIOR_S
        self._ordered: deque[float] = deque()
        # In the order of their last observation; None before the first one.
        self._known: dict[str, None] | None = None
        self._is_learned = False

    def on_order(self, more: int, now: float) -> None:
        """Record orders of additional replicas. A negative number cancels the last orders."""
        for _ in range(more):
            self._ordered.append(now)
        for _ in range(min(-more, len(self._ordered))):
            self._ordered.pop()

    def on_ready(self, replica_ids: Iterable[str], now: float) -> None:
        """Learn from the replicas that accept requests now."""
        ready = tuple(replica_ids)
        joined = 0 if self._known is None else sum(each not in self._known for each in ready)
        self._record_ready(ready)
        for _ in range(min(joined, len(self._ordered))):
            self._learn(now - self._ordered.popleft())

    def learned_s(self) -> float | None:
        """Return the mean to be persisted, or None if nothing has been learned."""
        return self.seconds if self._is_learned else None

    def restore(self, seconds: float) -> None:
        """Continue from a persisted mean."""
        self.seconds, self._is_learned = seconds, True

    def _learn(self, took_s: float) -> None:
        self.seconds = took_s if not self._is_learned else self.seconds + _WEIGHT * (took_s - self.seconds)
        self._is_learned = True

    def _record_ready(self, ready: tuple[str, ...]) -> None:
        known = self._known = {} if self._known is None else self._known
        for each in ready:
            known.pop(each, None)
            known[each] = None
        while len(known) > _KNOWN:
            del known[next(iter(known))]

    def __repr__(self) -> str:
        return f"<StartTime {self.seconds:.1f} s, {len(self._ordered)} ordered>"


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


class FleetScaler:
    """Decides the number of replicas for all pools of a model."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._pools = {name: PoolScaler(pool) for name, pool in settings.pools.items()}

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that it decides for."""
        return tuple(self._pools)

    def change(self, settings: ScalingSettings) -> None:
        """Apply other bounds from now on. Learned values of the same pools are retained."""
        self._settings = settings
        for name, scaler in self._pools.items():
            scaler.change(settings.pools[name])

    def start_times(self) -> dict[str, float]:
        """Return the learned start times of engines, in seconds by pool."""
        learned = {name: scaler.start_time.learned_s() for name, scaler in self._pools.items()}
        return {name: seconds for name, seconds in learned.items() if seconds is not None}

    def restore(self, start_s: Mapping[str, float]) -> None:
        """Continue from a result of `start_times`, except for removed pools."""
        for name in self._pools.keys() & start_s:
            self._pools[name].start_time.restore(start_s[name])

    def decide(self, views: Mapping[str, PoolView], now: float) -> dict[str, PoolDecision]:
        """Return the replicas that every pool should have.

        Args:
            views: one for each pool.
            now: time in seconds, not less than in the previous call.
        """
        decisions = {name: scaler.decide(views[name], now) for name, scaler in self._pools.items()}
        needs = {name: self._need(name, decision) for name, decision in decisions.items()}
        allocated = share_gpus(needs, self._settings.gpu_budget)
        for name, scaler in self._pools.items():
            scaler.settle(allocated[name], now)
            if self._settings.pools[name].replicas is not None:
                # The decision reports the pool's need, but the budget is charged for its fixed replicas.
                continue
            if allocated[name] < decisions[name].replicas:
                reason = f"{decisions[name].reason}; limited by the GPU budget"
                decisions[name] = replace(
                    # The replicas beyond this number are already allocated to another pool.
                    decisions[name],
                    replicas=allocated[name],
                    reason=reason,
                    may_shrink=True,
                )
        return decisions

    def _need(self, name: str, decision: PoolDecision) -> PoolNeed:
        pool = self._settings.pools[name]
        return PoolNeed(
            replicas=decision.replicas if pool.replicas is None else pool.replicas,
            needed=decision.needed,
            least=pool.least,
            gpus=pool.gpus,
        )

    def __repr__(self) -> str:
        return f"<FleetScaler {', '.join(f'{name} {each.desired}' for name, each in self._pools.items())}>"
