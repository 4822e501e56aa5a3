"""What autoscaling sees of each pool, read from the scheduler once a second."""

from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.request import PriorityClass
from serve_app.routing.replica_state import ReplicaState
from serve_app.scheduling import Scheduler
from serve_app.scheduling.request import ScheduledRequest

# Prefills from which their learned cost is no longer mostly its prior.
_LEARNED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One pool at one moment. Work is that of requests at home in it, without the batch class.

    Attributes:
        ready: replicas that take requests.
        replica_ids: which these are.
        arrived_requests, arrived_prefill_tokens, arrived_output_tokens: since the scheduler began.
        waiting_requests, waiting_prefill_tokens, waiting_output_tokens: in the queue.
        is_wanted: something waits for it or runs on it, of whatever class.
        oldest_wait_s: the longest wait of the heads in its queue that another replica could serve.
        in_flight: requests on its replicas, wherever they are at home.
        slots: sequences that its ready replicas run when they are full, by batch or by KV cache.
        full_ratio: share of the slots or of the KV cache in use, whichever is more (0-1).
        prefill_token_s: seconds per prompt token; None while unknown.
        stated: sequences of a full batch and the TPOT with them, as an engine states them.
        reports: sequences and TPOT of the replicas that have reported both.
        tpot_limit_s: TPOT above which its engines get nothing more; None is no limit.
    """

    ready: int
    replica_ids: tuple[str, ...] = ()
    arrived_requests: int = 0
    arrived_prefill_tokens: int = 0
    arrived_output_tokens: int = 0
    waiting_requests: int = 0
    waiting_prefill_tokens: int = 0
    waiting_output_tokens: int = 0
    is_wanted: bool = False
    oldest_wait_s: float = 0.0
    in_flight: int = 0
    slots: float = 0.0
    full_ratio: float = 0.0
    prefill_token_s: float | None = None
    stated: tuple[int, float] | None = None
    reports: tuple[tuple[int, float], ...] = ()
    tpot_limit_s: float | None = None


def observe(scheduler: Scheduler, pools: Iterable[str], now: float) -> dict[str, PoolView]:
    """The pools of a scheduler at `now`."""
    oldest = _oldest_waits(scheduler, now)
    wanted = {pools[0] for pools, work in scheduler.queue.work.items() if work.requests}
    wanted |= {pool for pool, work in scheduler.queue.urgent_work.items() if work.requests}
    return {pool: _view(scheduler, pool, oldest.get(pool, 0.0), pool in wanted) for pool in pools}


def _view(scheduler: Scheduler, pool: str, oldest_wait_s: float, waits: bool) -> PoolView:
    members = [state for state in scheduler.ledger if state.spec.pool == pool]
    ready = [state for state in members if state.is_alive]
    waiting, arrived = scheduler.queue.urgent_work[pool], scheduler.arrived[pool]
    in_flight = sum(state.in_flight for state in members)
    mean_tokens = _mean_tokens(ready, waiting.tokens, waiting.requests)
    slots = sum(_slots(state, mean_tokens) for state in ready)
    busy = sum(state.in_flight for state in ready)
    kv_tokens = sum(state.kv_budget for state in ready)
    held = sum(state.held_tokens for state in ready)
    return PoolView(
        ready=len(ready),
        replica_ids=tuple(state.spec.replica_id for state in ready),
        arrived_requests=arrived.requests,
        arrived_prefill_tokens=arrived.prefill_tokens,
        arrived_output_tokens=arrived.output_tokens,
        waiting_requests=waiting.requests,
        waiting_prefill_tokens=waiting.prompt_tokens,
        waiting_output_tokens=waiting.tokens - waiting.prompt_tokens,
        is_wanted=waits or in_flight > 0,
        oldest_wait_s=oldest_wait_s,
        in_flight=in_flight,
        slots=slots,
        # Beyond its batch an engine has a few that wait, which is no reason for another one.
        full_ratio=min(1.0, max(busy / slots if slots else 0.0, held / kv_tokens if kv_tokens else 0.0)),
        prefill_token_s=_prefill_token_s(scheduler, pool, ready),
        stated=_stated(ready),
        reports=tuple(_reports(ready)),
        # As it is in force, which a tuner may have changed.
        tpot_limit_s=scheduler.settings.backpressure_in_force.tpot_gate_s,
    )


def _oldest_waits(scheduler: Scheduler, now: float) -> dict[str, float]:
    oldest: dict[str, float] = {}
    for head, _ in scheduler.queue.sub_queue_heads():
        home = head.pools[0]
        if head.request.priority is not PriorityClass.BATCH and _is_helped(scheduler, head, home):
            oldest[home] = max(oldest.get(home, 0.0), now - head.request.arrived_at)
    return oldest


def _is_helped(scheduler: Scheduler, head: ScheduledRequest, pool: str) -> bool:
    """Whether another replica of a pool could serve a request.

    Only one replica keeps what a bound request refers to. A LoRA adapter that was loaded into some engines
    will not be in a new one.
    """
    wanted = head.request.destination
    if wanted.replica_id is not None:
        return False
    return wanted.adapter is None or all(
        wanted.adapter in state.spec.adapters
        for state in scheduler.ledger
        if state.spec.pool == pool and state.is_alive
    )


def _mean_tokens(ready: list[ReplicaState], waiting_tokens: int, waiting_requests: int) -> float:
    """Mean KV tokens of a request that runs or waits; 1 while there is none."""
    requests = waiting_requests + sum(state.in_flight for state in ready)
    tokens = waiting_tokens + sum(state.held_tokens for state in ready)
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
