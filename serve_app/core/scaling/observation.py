"""Observation: the load of each pool, as the autoscaler sees it."""

from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.core import Scheduler
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.request import PriorityClass

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
