"""The prior of the drain rate: the rate at which the replicas' slots drain the queue, before it was measured.

A full engine computes the prompt of each request, and decodes as many answers at a time as it has slots. So
one request costs it

    request_s = max(prompt tokens * prefill_token_s, output tokens * tpot_s / slots)

    slots = min(max_num_seqs, KV budget / tokens of a request)

with the means of the queued requests: prompts are computed while weights are read for decoding (see
`engines.model.step_time`), and a reported `tpot_s` includes what they add. The fleet drains the sum of `1 /
request_s`, and free slots accept work immediately. `tpot_s` of a replica is the last reported value, else
the value that its engine stated when it joined. The time per prompt token is the engine's, else the learned
one; if neither is known, prefills are free. Output lengths not yet learned are assumed short.

The resulting wait is a lower bound if the lengths are right. In this model slots become free one after the
other, on a cold engine all together. Isolation, priority classes and gates are ignored. If a replica's
`tpot_s` is unknown, there is no prior and it rejects nothing.
"""

from dataclasses import dataclass

from serve_app.core.dispatch.backpressure import EngineBackpressure
from serve_app.core.queueing.request_queue import RequestQueue, WaitingWork
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.routing.replica_state import ReplicaState

# Prefills after which their learned cost no longer depends mostly on its prior.
_LEARNED = 20
# Tolerance for rounding errors.
_ROUNDING_MARGIN = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class SlotDrain:
    """Capacity of the replicas that a request competes for.

    Attributes:
        tokens_ahead: work served before the request.
        tokens_per_s: drain rate of a full fleet.
        free_tokens: work that free slots accept immediately.
    """

    tokens_ahead: float
    tokens_per_s: float
    free_tokens: float


class SlotRate:
    """Computes the prior of the drain rate. Engines accept `target_waiting` requests beyond their batch."""

    def __init__(
        self,
        queue: RequestQueue,
        ledger: ReplicaLedger,
        prefill_costs: PrefillCosts,
        backpressure: EngineBackpressure,
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._prefill_costs = prefill_costs
        self._backpressure = backpressure

    def drain(self, pools: tuple[str, ...], work_ahead: int) -> SlotDrain | None:
        """Return the work that drains before a request that arrives now.

        Args:
            work_ahead: tokens served before it (`RequestQueue.work_ahead`).

        Returns:
            None if nothing waits or the pace of a replica is unknown.
        """
        work, reached = self._competing(pools)
        if not work.tokens:
            return None
        requests_per_s = free_requests = 0.0
        any_alive = False
        for state in self._ledger:
            if not state.is_alive or state.spec.pool not in reached:
                continue
            share = self._share(state, work)
            if share is None:
                return None
            any_alive = True
            requests_per_s += share[0]
            free_requests += share[1]
        if not any_alive:
            return None
        mean_tokens = work.tokens / work.requests
        return SlotDrain(
            # Work for other pools is not ahead, even if it is more urgent.
            tokens_ahead=min(work_ahead, work.tokens),
            tokens_per_s=requests_per_s * mean_tokens,
            free_tokens=free_requests * mean_tokens,
        )

    def certainly_drains(self, pools: tuple[str, ...], work_ahead: int, seconds: float) -> bool:
        """Return whether `drain` gives no reason to reject a request that may wait `seconds`.

        The work ahead drains in time, or nothing can be computed because the pace of a replica is unknown.
        Inspects only as many replicas as it needs. May return False if the time is only just enough.
        """
        work, reached = self._competing(pools)
        if not work.tokens:
            return True
        remaining = _ROUNDING_MARGIN * min(work_ahead, work.tokens) * work.requests / work.tokens
        for pool in sorted(reached):
            for state in self._ledger.of_pool(pool):
                if not state.is_alive:
                    continue
                share = self._share(state, work)
                if share is None:
                    return True
                remaining -= seconds * share[0] + share[1]
                if remaining < 0:
                    return True
        return False

    def _share(self, state: ReplicaState, work: WaitingWork) -> tuple[float, float] | None:
        """Return the requests per second of a replica and its free slots, or None if its pace is unknown."""
        slots = min(state.likely_num_seqs, max(1.0, state.kv_budget * work.requests / work.tokens))
        engine_s = self._engine_s(state, work, slots)
        if engine_s is None:
            return None
        accepted = slots + self._backpressure.target_waiting
        return work.requests / engine_s, max(0.0, accepted - state.in_flight)

    def _competing(self, pools: tuple[str, ...]) -> tuple[WaitingWork, set[str]]:
        """Return all work queued for any of these pools, and the pools that may serve it."""
        work, reached = WaitingWork(), set(pools)
        own = frozenset(pools)
        for others, waiting in self._queue.work.items():
            if waiting.requests and not own.isdisjoint(others):
                work.merge(waiting)
                reached.update(others)
        return work, reached

    def _engine_s(self, state: ReplicaState, work: WaitingWork, slots: float) -> float | None:
        """Return the seconds that a full engine needs for all the work, or None if its pace is unknown."""
        spec = state.spec
        tpot_s = spec.tpot_s if state.tpot_s is None else state.tpot_s
        if tpot_s is None:
            return None
        cost = self._prefill_costs.of(spec.pool)
        learned_s = cost.per_token_s if cost.observations >= _LEARNED else 0.0
        prefill_token_s = learned_s if spec.prefill_token_s is None else spec.prefill_token_s
        engine_s = max(work.prompt_tokens * prefill_token_s, work.least_output_tokens * tpot_s / slots)
        return engine_s or None
