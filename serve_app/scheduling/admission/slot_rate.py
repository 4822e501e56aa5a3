"""The prior of the drain rate: what the slots of the replicas can drain, before any rate was measured.

A full engine computes the prompt of each request, and decodes as many answers at a time as it has slots. So
one request costs it

    engine_s = max(prompt tokens * prefill_token_s, output tokens * tpot_s / slots)

    slots = min(max_num_seqs, KV budget / tokens of a request)

with the means of the requests that wait: prompts are computed while weights are read for decoding (see
`engine_model.step_time`), and a reported `tpot_s` includes what they add. The fleet drains the sum of
`1 / engine_s`, and the free slots take work at once. A replica's `tpot_s` is what it reported last, or else
what its engine stated when it joined. The time per prompt token is the engine's, or else the learned one;
where neither is known, prefills are free. Output lengths that have not been learned are taken low.

The wait that follows is a lower bound as far as the lengths are right. Slots free up one after the other
here, and those of a cold engine all together; isolation, classes of service and gates are left out. There is
no prior where a replica's `tpot_s` is unknown: then nothing is refused on its account.
"""

from dataclasses import dataclass

from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.prefill_cost import PrefillCosts
from serve_app.routing.replica_state import ReplicaState
from serve_app.scheduling.queueing.request_queue import RequestQueue
from serve_app.scheduling.queueing.waiting_work import WaitingWork

# Prefills from which their learned cost is no longer mostly its prior.
_LEARNED = 20
# What rounding may be off by, at most.
_SURELY = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class SlotDrain:
    """What the replicas that a request competes for can take.

    Attributes:
        tokens_ahead: work that is served before it.
        tokens_per_s: how much of that a full fleet drains.
        free_tokens: how much of it goes at once, into free slots.
    """

    tokens_ahead: float
    tokens_per_s: float
    free_tokens: float


class SlotRate:
    """Computes the prior from the ledger and the queue.

    Args:
        beyond_batch: requests that an engine is sent beyond its batch.
    """

    def __init__(
        self, queue: RequestQueue, ledger: ReplicaLedger, prefill_costs: PrefillCosts, beyond_batch: int
    ) -> None:
        self._queue = queue
        self._ledger = ledger
        self._prefill_costs = prefill_costs
        self._beyond_batch = beyond_batch

    def drain(self, pools: tuple[str, ...], work_ahead: int) -> SlotDrain | None:
        """What drains before a request that arrives now; None where nothing waits or a pace is unknown.

        Args:
            work_ahead: tokens that will be served before it (`RequestQueue.work_ahead`).
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
            # Work that goes to other pools is not ahead, however urgent it is.
            tokens_ahead=min(work_ahead, work.tokens),
            tokens_per_s=requests_per_s * mean_tokens,
            free_tokens=free_requests * mean_tokens,
        )

    def surely_drains(self, pools: tuple[str, ...], work_ahead: int, seconds: float) -> bool:
        """Whether all that `drain` finds ahead is gone within so many seconds, or it finds nothing.

        It looks at no more replicas than it takes to be sure, and may be False where that is just so.
        """
        work, reached = self._competing(pools)
        if not work.tokens:
            return True
        wanted = _SURELY * min(work_ahead, work.tokens) * work.requests / work.tokens
        for pool in sorted(reached):
            for state in self._ledger.of_pool(pool):
                if not state.is_alive:
                    continue
                share = self._share(state, work)
                if share is None:
                    return True
                wanted -= seconds * share[0] + share[1]
                if wanted < 0:
                    return True
        return False

    def _share(self, state: ReplicaState, work: WaitingWork) -> tuple[float, float] | None:
        """Requests per second that a replica drains, and how many go at once; None for an unknown pace."""
        slots = min(state.likely_num_seqs, max(1.0, state.kv_budget * work.requests / work.tokens))
        engine_s = self._engine_s(state, work, slots)
        if engine_s is None:
            return None
        return work.requests / engine_s, max(0.0, slots + self._beyond_batch - state.in_flight)

    def _competing(self, pools: tuple[str, ...]) -> tuple[WaitingWork, set[str]]:
        """All that waits for any of these pools, and the pools that it may go to."""
        work, reached = WaitingWork(), set(pools)
        own = frozenset(pools)
        for others, waiting in self._queue.work.items():
            if waiting.requests and not own.isdisjoint(others):
                work.merge(waiting)
                reached.update(others)
        return work, reached

    def _engine_s(self, state: ReplicaState, work: WaitingWork, slots: float) -> float | None:
        """Seconds of a full engine for all the work; None where its pace is unknown or without bound."""
        spec = state.spec
        tpot_s = spec.tpot_s if state.tpot_s is None else state.tpot_s
        if tpot_s is None:
            return None
        cost = self._prefill_costs.of(spec.pool)
        learned_s = cost.per_token_s if cost.observations >= _LEARNED else 0.0
        prefill_token_s = learned_s if spec.prefill_token_s is None else spec.prefill_token_s
        engine_s = max(work.prompt_tokens * prefill_token_s, work.least_output_tokens * tpot_s / slots)
        return engine_s or None
