"""Engine backpressure: bounds on what an engine is sent, and the larger one for batch work that is alone.

A request that waits in the engine can no longer be reordered. So the engine's own queue is kept just long
enough that it never runs empty. Two upper bounds on that queue are known at any moment, and the smaller
counts:

- *unstarted*: requests sent whose answer has not begun. It is exact and immediate for streamed answers. An
  answer that is not streamed begins only when it ends, so there it says little.
- *reported*: what waited in the engine at the last report, plus what was sent since, which the report cannot
  have seen. It is as old as the report.

A fixed target starves an engine that starts many requests between two reports. So against the second bound
the target grows to `lag_factor * starts per second * seconds between reports`.

A replica gets nothing more, whatever its queue, while it is too busy by one of these signs. Its time per
output token is above a limit, and has not clearly fallen since. Its KV cache is nearly full. Or the prompt
tokens under way are more seconds of prefill than a limit. KV use alone is not enough: it is low while prefill
is saturated.

The time per output token of an engine that does not report it is measured from its streamed answers
(`core.routing.observed`).

An engine whose reports do not say what waits has a limit of requests in flight instead, which its latency
moves (`core.routing.observed`). Where the size of its batch is known, that is the limit.

Source: TNG, "Efficient Request Queueing" (target 3; target - waiting may be sent at once). The growth with
rate and report delay is ours.
"""

import math
from typing import Annotated

from serve_app.core.request import RequestTable
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.core.settings_base import (
    ADVANCED,
    INTERNAL,
    NOT_NEGATIVE,
    POSITIVE,
    at_least,
    settings,
)

LONE_BATCH_FACTOR = 8
"""So many times `batch_prefill_s` are enough to fill iterations, where batch work can delay nobody."""


# Below this share of `tpot_gate_s` dispatch resumes, so that it does not oscillate.
_TPOT_REOPEN_RATIO = 0.9


@settings(block="backpressure")
class BackpressureSettings:
    """Limits on what an engine is sent."""

    # Requests in the engine's own queue that dispatch aims for. Higher keeps the engine busier when reports
    # are late; lower leaves more to the scheduler's order.
    target_waiting: Annotated[int, at_least(1)] = 3
    # How far the target grows with the replica's own pace: requests started per second times the time
    # between reports, times this.
    lag_factor: Annotated[float, NOT_NEGATIVE, INTERNAL] = 3.0
    # The target for the batch class: 0 sends batch work only to an engine whose queue is empty.
    batch_target_waiting: Annotated[int, NOT_NEGATIVE, INTERNAL] = 0
    # Batch work also goes to an engine with at most so many seconds of prefill under way, as learned from
    # first tokens. That is less than one iteration, so nothing waits behind it. With 0, one short batch
    # request runs in an iteration that has capacity for ten, and batch work alone loses about half of its
    # throughput; the TTFT of interactive requests beside it is lower then. Two seconds after the last request
    # above batch it is eight times as much.
    batch_prefill_s: Annotated[float, NOT_NEGATIVE, INTERNAL] = 0.02
    # Time per output token, in seconds, above which nothing more is sent: seven tokens per second are about
    # as many as people read. Null sets no limit.
    tpot_gate_s: Annotated[float | None, POSITIVE.hint("null is no gate")] = 0.15
    # Share of the KV cache in use above which nothing more is sent, since the next blocks would need a
    # preemption.
    kv_gate_ratio: Annotated[float, POSITIVE, INTERNAL] = 0.98
    # Seconds of prefill under way on a replica above which it gets nothing more, as learned from first
    # tokens. A single request may always be sent, however long.
    max_prefill_backlog_s: Annotated[float, POSITIVE, ADVANCED] = 4.0
    # A replica whose last report is older than this counts as saturated. Replicas report at least twice
    # a second.
    report_limit_s: Annotated[float, POSITIVE, INTERNAL] = 2.5
    # Share of the KV cache that may be reserved, at the *expected* length of each request. Reserving
    # max_tokens instead would leave much of the cache of a KV-bound replica unused.
    kv_fill_ratio: Annotated[float, POSITIVE, ADVANCED] = 1.0


class EngineBackpressure:
    """The bounds above, with the learned cost of prefills.

    Attributes:
        only_batch: nobody is there whom batch work could delay, see `lone_batch`.
    """

    def __init__(self, settings: BackpressureSettings, costs: PrefillCosts) -> None:
        self.only_batch = False
        self._settings = settings
        self._costs = costs

    def retune(self, settings: BackpressureSettings) -> None:
        """Apply other limits from now on; the ledger has to check each replica again."""
        self._settings = settings

    def admits(self, replica: ReplicaState, now: float) -> bool:
        """Whether one more request may be sent to a replica, as far as its engine's queue and batch go."""
        settings, batch = self._settings, replica.spec.max_num_seqs
        if batch is None:
            batch = replica.max_num_seqs
        if batch is not None and replica.in_flight >= batch + settings.target_waiting:
            return False
        if replica.pending_prefill_tokens and (
            self._prefill_backlog_s(replica) > settings.max_prefill_backlog_s
        ):
            return False
        if batch is None and (limit := replica.in_flight_limit) is not None:
            return replica.in_flight + 1 <= limit
        # A long prefill has its own limit, and is in the engine's batch, not in its queue.
        if replica.unstarted - replica.long_prefills[0] < settings.target_waiting:
            return True
        pace = settings.lag_factor * replica.starts.per_s(now) * replica.report_gap_s
        return replica.reported_queue < max(settings.target_waiting, math.ceil(pace))

    def has_empty_queue(self, replica: ReplicaState) -> bool:
        """Whether batch work may be sent: the engine's own queue is empty, or nearly so."""
        settings = self._settings
        prefill_s = self._prefill_backlog_s(replica) if replica.pending_prefill_tokens else 0.0
        # Where the batch is full, any request waits in the engine, however short its prefill.
        limit_s = settings.batch_prefill_s * (LONE_BATCH_FACTOR if self.only_batch else 1)
        if prefill_s <= limit_s and not self._batch_is_full(replica):
            return True
        # As in `admits`: long prefills are in the batch.
        queued = min(max(0, replica.unstarted - replica.long_prefills[0]), replica.reported_queue)
        return queued <= settings.batch_target_waiting

    def gates(self, replica: ReplicaState) -> bool:
        """Whether a replica that has just reported is too busy for more."""
        report, settings = replica.report, self._settings
        if report is None or not (replica.in_flight if report.running is None else report.running):
            return False
        if report.kv_usage_ratio is not None and report.kv_usage_ratio > settings.kv_gate_ratio:
            return True
        if settings.tpot_gate_s is None or report.tpot_s is None:
            return False
        share = _TPOT_REOPEN_RATIO if replica.gated else 1.0
        return report.tpot_s > share * settings.tpot_gate_s

    def _batch_is_full(self, replica: ReplicaState) -> bool:
        batch = replica.max_num_seqs
        return replica.reported_queue > 0 if batch is None else replica.in_flight >= batch

    def _prefill_backlog_s(self, replica: ReplicaState) -> float:
        """Seconds of prefill under way, as learned."""
        return replica.pending_prefill_tokens * self._costs.of(replica.spec.pool).per_token_s


# Lone batch work: where nobody else is there, engines get enough of it to fill their iterations.
#
# Beside requests of higher classes batch work goes only to an engine that has next to nothing to prefill, so
# that whoever comes finds it ready. Where nobody comes that leaves iterations half empty, and short batch
# requests lose up to half of their throughput. So an engine gets more once no request above the batch class
# is there and none has arrived for a while. The first one that comes then waits for that much more, and ends
# it.


# As long as isolation waits for a short request.
LULL_S = 2.0


class LoneBatch:
    """Tells backpressure whether only batch work is there."""

    def __init__(
        self, requests: RequestTable, backpressure: EngineBackpressure, ledger: ReplicaLedger
    ) -> None:
        self._requests, self._backpressure, self._ledger = requests, backpressure, ledger

    def __repr__(self) -> str:
        return f"<LoneBatch {'on' if self._backpressure.only_batch else 'off'}>"

    def look(self, now: float) -> None:
        """To be called before each dispatch; costs a look at every replica where that has changed."""
        requests = self._requests
        only_batch = not requests.above_batch and now - requests.last_above_batch_at > LULL_S
        if only_batch is not self._backpressure.only_batch:
            self._backpressure.only_batch = only_batch
            self._ledger.on_limits_changed(now)
