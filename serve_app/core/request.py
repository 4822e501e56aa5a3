"""A request inside the scheduler, from its admission to its outcome, and the table of all that are known."""

import math
from dataclasses import dataclass

from serve_app.core.accounting.engine_share import EngineShare
from serve_app.core.accounting.wait_causes import WaitTally
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.replica_state import Hold, PrefillClass
from serve_app.request import PriorityClass, Request, Usage

NOTHING = Hold(0)

WaitKind = tuple[int, int, bool]
"""Class rank, octave of the expected prompt, and whether the request claimed a retry reservation."""


@dataclass(frozen=True, slots=True)
class PredictedWait:
    """The wait that was predicted for a request when it arrived, in seconds.

    Attributes:
        at: when it was predicted.
        uncorrected_s: work ahead / drain rate.
        wait_s: the same, times the correction of its kind.
    """

    kind: WaitKind
    at: float
    uncorrected_s: float
    wait_s: float


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request, waiting or running.

    Attributes:
        sequence: order of admission; breaks ties.
        pools: pools that may serve it, its home first.
        expires_at: when its queue timeout ends.
        length_queue: the length queue that it waits in, or was dispatched from.
        returned: it came back from a replica that was lost, and is dispatched before requests that never
            were.
        claimed: it claimed a retry reservation, and is dispatched before others of its sub-queue.
        put_backs: how often it came back from a replica, for whatever reason.
        losses: replicas that it was lost on; after the first it is in quarantine.
        avoided: replicas that it has failed on.
        failed_on: the replica that it failed on last, until an answer begins.
        last_failure: why, in the words of its gateway.
        resting_until: it waits, and is not dispatched before this time; 0 where it may be at once.
        above_tokens: context limit of the longest engine that refused it as too long.
        too_long_for: replicas that refused it as too long, and do not tell their context limit.
        queued: it is in the request queue.
        replica_id: where it runs; None while it waits, and after its end.
        counted_at: what the router's `on_arrival` returned for it.
        hold: what its replica's ledger holds for it.
        engine_priority: the priority sent to its engine; None for none.
        prefill_class: of its whole prefill, by the boundaries at its admission (see `isolation`).
        cached_tokens: of its prompt, on the replica where it runs; while it waits, on the one that has most.
        dispatched_at: when it was sent to that replica.
        dispatch_number: requests that replica had been sent by then, this one included.
        prefilled_alone: no other prefill was under way on that replica when it was sent.
        started: its answer has begun.
        started_at: when that was heard of; None where an earlier scheduler heard of it.
        charged: service that its tenant was charged for it.
        key_charge: tokens that the limit of its key was charged; None where there is no such limit.
        usage: what the engine counted, once it is over.
        prediction: of its wait; None when none was possible, or it came back from a replica.
        turn: work that leaves the queue before it in the order of arrival, see `queueing.delay_bound`; None
            for short prompts, and outside the queue.
        waits: its wait so far by cause; None until it has waited.
        engine_share: what it owes to its replica; None while it is on none.
    """

    request: Request
    estimate: TokenEstimate
    sequence: int
    pools: tuple[str, ...]
    expires_at: float = math.inf
    length_queue: str = ""
    returned: bool = False
    claimed: bool = False
    put_backs: int = 0
    losses: int = 0
    avoided: frozenset[str] = frozenset()
    failed_on: str | None = None
    last_failure: str = ""
    resting_until: float = 0.0
    above_tokens: int = 0
    too_long_for: tuple[str, ...] = ()
    queued: bool = False
    replica_id: str | None = None
    counted_at: float = 0.0
    hold: Hold = NOTHING
    prefill_class: PrefillClass = PrefillClass.SHORT
    engine_priority: int | None = None
    cached_tokens: int = 0
    dispatched_at: float = 0.0
    dispatch_number: int = 0
    prefilled_alone: bool = False
    started: bool = False
    started_at: float | None = None
    charged: float = 0.0
    key_charge: int | None = None
    usage: Usage | None = None
    prediction: PredictedWait | None = None
    turn: int | None = None
    passed: bool = False
    waits: WaitTally | None = None
    engine_share: EngineShare | None = None

    @property
    def prefill_tokens(self) -> int:
        """Expected prompt tokens that are not cached, at least 1: its length as policies see it."""
        return max(1, self.estimate.expected_prompt_tokens - self.cached_tokens)

    def __repr__(self) -> str:
        place = f"waiting in {self.length_queue}" if self.queued else f"running on {self.replica_id}"
        return f"<ScheduledRequest {self.request.request_id} {self.estimate.budget_tokens} tokens {place}>"


class RequestTable:
    """All requests that wait or run, by id and by the gateway that holds their client's connection.

    Attributes:
        above_batch: how many are of a class above batch.
        last_above_batch_at: when the last of these arrived, on the scheduler's clock; -inf before the first.
    """

    def __init__(self) -> None:
        self.above_batch = 0
        self.last_above_batch_at = -math.inf
        self._requests: dict[str, ScheduledRequest] = {}
        self._by_gateway: dict[str, dict[str, ScheduledRequest]] = {}

    def add(self, scheduled: ScheduledRequest) -> None:
        """Add a request that is not in the table."""
        request = scheduled.request
        self._requests[request.request_id] = scheduled
        self._by_gateway.setdefault(request.gateway_id, {})[request.request_id] = scheduled
        if request.priority is not PriorityClass.BATCH:
            self.above_batch += 1
            self.last_above_batch_at = max(self.last_above_batch_at, request.arrived_at)

    def get(self, request_id: str) -> ScheduledRequest | None:
        """The request of this id; None when it is unknown or has ended."""
        return self._requests.get(request_id)

    def pop(self, request_id: str) -> ScheduledRequest | None:
        """Remove a request and return it; None when it is unknown."""
        scheduled = self._requests.pop(request_id, None)
        if scheduled is not None:
            of_gateway = self._by_gateway[scheduled.request.gateway_id]
            del of_gateway[request_id]
            if not of_gateway:
                del self._by_gateway[scheduled.request.gateway_id]
            self.above_batch -= scheduled.request.priority is not PriorityClass.BATCH
        return scheduled

    def of_gateway(self, gateway_id: str) -> list[ScheduledRequest]:
        """All requests of one gateway."""
        return list(self._by_gateway.get(gateway_id, {}).values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)
