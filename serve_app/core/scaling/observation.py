"""What autoscaling observes of a pool.

Observation: the load of each pool, as the autoscaler sees it.

The speed of a pool's engines: seconds of an engine per prompt and output token, learned from reports.

A full engine decodes as many answers at a time as it has slots, so a token of an answer costs it

    output_token_s = TPOT at `slots` sequences / slots

TPOT is linear in the number of running sequences, as in `engines.model.step_time`. It is fitted by least
squares over the replicas' reports, of which about the last few hundred count. The effect of prefills on a
reported TPOT is removed, because prompts are counted separately. The prior is what the engines report of a
full batch when they join. If neither is known, the speed is unknown.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.core import Scheduler
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import ReplicaState
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


class DecodeLine:
    """TPOT as a linear function of the number of sequences."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, sequences: float, tpot_s: float, weight: float = 1.0) -> None:
        """Add one report of a busy engine."""
        self._weight = _DECAY * self._weight + weight
        self._x = _DECAY * self._x + weight * sequences
        self._y = _DECAY * self._y + weight * tpot_s
        self._xx = _DECAY * self._xx + weight * sequences * sequences
        self._xy = _DECAY * self._xy + weight * sequences * tpot_s

    def tpot_s(self, sequences: float) -> float | None:
        """Return the seconds per token with `sequences` sequences, or None before any report."""
        if not self._weight:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread > 1e-9:
            slope = (self._xy / self._weight - mean_x * mean_y) / spread
        # More sequences never make a step shorter, and no step has a negative duration.
        slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
        return mean_y + slope * (sequences - mean_x)


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
    members = [state for state in scheduler.ledger if state.spec.pool == pool]
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
        home = head.pools[0]
        if head.request.priority is not PriorityClass.BATCH and _can_scale_out_help(scheduler, head, home):
            oldest[home] = max(oldest.get(home, 0.0), now - head.request.arrived_at)
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
        for state in scheduler.ledger
        if state.spec.pool == pool and state.is_alive
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
