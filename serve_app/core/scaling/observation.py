"""The input of autoscaling: the load of each pool, the speed of its engines, and their start time."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.core import Scheduler
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.request import PriorityClass

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


# The speed of a pool's engines: seconds of an engine that a request's prompt and answer take, from reports.
#
# A full engine decodes as many answers at a time as it has slots, so a token of an answer costs it
#
#     output_token_s = TPOT at `slots` sequences / slots
#
# TPOT is a line over the sequences that run, as in `engines.model.step_time`. It is fitted by least squares
# over the replicas' reports, of which the last few hundred count. What prefills add to a reported TPOT is
# taken out, because prompts are counted on their own. A pool begins with what its engines state of a full
# batch. While neither is known, nothing is said of its speed.


# A report's weight after n more is `_KEPT ** n`.
_KEPT = 0.998
# Weight of what the engine states, in reports.
_STATED_WEIGHT = 2.0
# Prefills that fill an engine nearly leave nothing to tell about decoding.
_MOST_PREFILL_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """What a token costs an engine that is full.

    Attributes:
        prefill_token_s: seconds of the engine per prompt token.
        output_token_s: the same per token of an answer.
    """

    prefill_token_s: float
    output_token_s: float

    def seconds(self, prefill_tokens: float, output_tokens: float) -> float:
        """Seconds of one engine for this work."""
        return prefill_tokens * self.prefill_token_s + output_tokens * self.output_token_s


class DecodeLine:
    """TPOT as a line over the number of sequences."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, sequences: float, tpot_s: float, weight: float = 1.0) -> None:
        """Take in one report of a busy engine."""
        self._weight = _KEPT * self._weight + weight
        self._x = _KEPT * self._x + weight * sequences
        self._y = _KEPT * self._y + weight * tpot_s
        self._xx = _KEPT * self._xx + weight * sequences * sequences
        self._xy = _KEPT * self._xy + weight * sequences * tpot_s

    def tpot_s(self, sequences: float) -> float | None:
        """Seconds per token with so many sequences; None before any report."""
        if not self._weight:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread > 1e-9:
            slope = (self._xy / self._weight - mean_x * mean_y) / spread
        # More sequences never make a step shorter, and no step is shorter than nothing.
        slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
        return mean_y + slope * (sequences - mean_x)


class PoolSpeed:
    """The speed of the engines of one pool.

    Attributes:
        slots: sequences that a full replica runs; 0 while no replica has been seen.
    """

    def __init__(self) -> None:
        self._line = DecodeLine()
        self._stated: tuple[float, float] | None = None
        self._prefill_token_s: float | None = None
        self.slots = 0.0

    def state(self, sequences: int, tpot_s: float) -> None:
        """What its engines state of a full batch; counts once."""
        if self._stated != (sequences, tpot_s):
            self._stated = (sequences, tpot_s)
            self._line.observe(sequences, tpot_s, _STATED_WEIGHT)

    def observe(self, sequences: int, tpot_s: float, prefill_ratio: float) -> None:
        """Take in one report.

        Args:
            sequences: that ran at the report.
            prefill_ratio: share of the engine's time that prefills took meanwhile.
        """
        if sequences > 0:
            self._line.observe(sequences, tpot_s * (1.0 - min(prefill_ratio, _MOST_PREFILL_RATIO)))

    def set_prefill(self, token_s: float | None) -> None:
        """Seconds per prompt token, where they are known."""
        self._prefill_token_s = token_s if token_s is not None else self._prefill_token_s

    def now(self, tpot_limit_s: float | None) -> EngineSpeed | None:
        """The speed at present; None while it is not known.

        Args:
            tpot_limit_s: TPOT above which an engine gets nothing more, which may leave slots empty.
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
        """The most sequences whose TPOT is within the limit, at least one."""
        if limit_s is None or (self._line.tpot_s(slots) or 0.0) <= limit_s:
            return slots
        single, full = self._line.tpot_s(1.0) or 0.0, self._line.tpot_s(slots) or 0.0
        if full <= single:
            return slots
        return max(1.0, 1.0 + (slots - 1.0) * (limit_s - single) / (full - single))


# How long an engine takes to start, learned from orders and arrivals of replicas.


# Weight of one start in the mean.
_WEIGHT = 0.3
# Before the first: a small model on a node that is there.
_PRIOR_S = 60.0
# Replicas that are remembered after they have gone; many more than a pool has at a time.
_KNOWN = 10_000


class StartTime:
    """The mean time from an order to a replica that takes requests.

    A replica counts once. One that was gone for a moment, or has found another scheduler, has not started.

    Attributes:
        seconds: that mean.
    """

    def __init__(self) -> None:
        self.seconds = _PRIOR_S
        self._ordered: deque[float] = deque()
        # In the order in which they were last seen; None before the first look.
        self._known: dict[str, None] | None = None
        self._is_learned = False

    def on_order(self, more: int, now: float) -> None:
        """So many replicas more are ordered; a negative number takes back the last orders."""
        for _ in range(more):
            self._ordered.append(now)
        for _ in range(min(-more, len(self._ordered))):
            self._ordered.pop()

    def on_ready(self, replica_ids: Iterable[str], now: float) -> None:
        """These replicas take requests now."""
        ready = tuple(replica_ids)
        came = 0 if self._known is None else sum(each not in self._known for each in ready)
        self._remember(ready)
        for _ in range(min(came, len(self._ordered))):
            self._learn(now - self._ordered.popleft())

    def learned_s(self) -> float | None:
        """The mean, to be kept; None while nothing has been learned."""
        return self.seconds if self._is_learned else None

    def restore(self, seconds: float) -> None:
        """Go on from what an earlier one has learned."""
        self.seconds, self._is_learned = seconds, True

    def _learn(self, took_s: float) -> None:
        self.seconds = took_s if not self._is_learned else self.seconds + _WEIGHT * (took_s - self.seconds)
        self._is_learned = True

    def _remember(self, ready: tuple[str, ...]) -> None:
        known = self._known = {} if self._known is None else self._known
        for each in ready:
            known.pop(each, None)
            known[each] = None
        while len(known) > _KNOWN:
            del known[next(iter(known))]

    def __repr__(self) -> str:
        return f"<StartTime {self.seconds:.1f} s, {len(self._ordered)} ordered>"
