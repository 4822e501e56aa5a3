"""Engine backpressure: limits on the requests sent to an engine, so that its own queue stays short.

A request in the engine's queue can no longer be reordered. The engine's queue should therefore be just long
enough never to run empty. Two upper bounds of its length are known at any time, and the smaller one counts:

- *unstarted*: requests sent whose answer has not started. It is exact and immediate for streamed answers. An
  answer that is not streamed starts only at its end, so this bound is loose there.
- *reported*: requests queued in the engine at the last report, plus those sent since, which the report cannot
  include. It is as old as the report.

A fixed target starves an engine that starts many requests between two reports. For the second bound the
target therefore grows to `lag_factor * starts per second * seconds between reports`.

A replica receives no requests, whatever its queue, while one of these signals shows overload:

- its reported time per output token is above a limit, clearly above that of a low load, and has not clearly
  fallen since;
- its KV cache is nearly full;
- the prompt tokens in flight amount to more seconds of prefill than a limit, except those of long prefills
  that the engine computes in chunks: short requests pass them.

KV use alone is not sufficient: it is low while prefill is saturated.

An engine whose reports do not include its queue gets no request beyond its batch size, because such a request
waits where it is not seen. If that is unknown too, its limit is learned from its answers (`LearnedLimit` in
`core.routing.observed`), and none of the signals above applies.

Source: TNG, "Efficient Request Queueing" (target 3; target - waiting may be sent at once). The growth with
rate and report delay is ours.
"""

import math
from typing import Annotated

from serve_app.core.dispatch.backfill import Backfill
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

ALONE_FACTOR = 8
"""Factor of `batch_prefill_s` that fills iterations when batch work cannot delay any other request."""


# Hysteresis: dispatch resumes below this share of `tpot_gate_s`.
_TPOT_REOPEN_RATIO = 0.9
# Ratio to the least time per output token of an engine from which its load counts as the reason.
_SLOWER = 1.25


@settings(block="backpressure")
class BackpressureSettings:
    """Limits on the requests sent to an engine."""

    # Target number of requests in the engine's own queue. A higher value keeps the engine busier when reports
    # are late; a lower one leaves more requests in the scheduler's order.
    target_waiting: Annotated[int, at_least(1)] = 3
    # Growth of the target with the pace of the replica: the target is at least this factor times requests
    # started per second times the time between reports.
    lag_factor: Annotated[float, NOT_NEGATIVE, INTERNAL] = 3.0
    # Batch work is sent to an engine with an empty queue, or with at most this many seconds of prefill in
    # flight, as learned from first tokens. The default is less than one iteration, so nothing queues behind
    # it. With 0, one short batch request runs in an iteration that has capacity for ten, and batch work alone
    # loses about half of its throughput, but the TTFT of concurrent interactive requests is lower. The limit
    # is eight times as high on a replica that serves only batch work.
    batch_prefill_s: Annotated[float, NOT_NEGATIVE, INTERNAL] = 0.02
    # Time per output token, in seconds, above which a replica receives no more requests. The default is seven
    # tokens per second, about the speed of reading. Null sets no limit.
    tpot_gate_s: Annotated[float | None, POSITIVE.hint("null disables the gate")] = 0.15
    # Share of the KV cache in use above which a replica receives no more requests, because further blocks
    # would need a preemption.
    kv_gate_ratio: Annotated[float, POSITIVE, INTERNAL] = 0.98
    # Seconds of prefill in flight above which a replica receives no more requests, as learned from first
    # tokens. One request may always be sent, however long its prompt is. Long prefills that the engine
    # computes in chunks do not count, because others pass them; isolation limits them.
    max_prefill_backlog_s: Annotated[float, POSITIVE, ADVANCED] = 4.0
    # A replica whose last report is older than this many seconds counts as saturated. Replicas report at
    # least twice per second.
    report_limit_s: Annotated[float, POSITIVE, INTERNAL] = 2.5


class EngineBackpressure:
    """Checks replicas against the limits."""

    def __init__(self, settings: BackpressureSettings, costs: PrefillCosts, backfill: Backfill) -> None:
        self._backfill = backfill
        self._settings = settings
        self._costs = costs

    @property
    def target_waiting(self) -> int:
        """The current limit on requests that wait in an engine."""
        return self._settings.target_waiting

    def retune(self, settings: BackpressureSettings) -> None:
        """Apply other limits from now on. The ledger must check each replica again."""
        self._settings = settings

    def admits(self, replica: ReplicaState, now: float) -> bool:
        """Return whether the queue and batch of a replica's engine allow one more request."""
        settings = self._settings
        if not replica.reports_queue:
            return _admits_unseen(replica)
        batch = replica.max_num_seqs
        if batch is not None and replica.in_flight >= batch + settings.target_waiting:
            return False
        if replica.prefills.tokens and (
            self._prefill_backlog_s(replica, without_chunked=True) > settings.max_prefill_backlog_s
        ):
            return False
        # Long prefills have their own limit, and are in the engine's batch, not in its queue.
        if replica.unstarted - replica.prefills.long[0] < settings.target_waiting:
            return True
        pace = settings.lag_factor * replica.starts.per_s(now) * replica.reports.gap_s
        return replica.reported_queue < max(settings.target_waiting, math.ceil(pace))

    def admits_backfill(self, replica: ReplicaState, now: float) -> bool:
        """Return whether batch work may be sent: there is capacity for it, and next to no engine queue."""
        if not self._backfill.admits(replica, now):
            return False
        settings = self._settings
        prefill_s = self._prefill_backlog_s(replica) if replica.prefills.tokens else 0.0
        # If the batch is full, any request waits in the engine, however short its prefill.
        factor = 1 if self._backfill.is_shared(replica, now) else ALONE_FACTOR
        limit_s = factor * settings.batch_prefill_s
        if prefill_s <= limit_s and not self._batch_is_full(replica):
            return True
        # As in `admits`: long prefills are in the batch.
        queued = min(max(0, replica.unstarted - replica.prefills.long[0]), replica.reported_queue)
        return queued == 0

    def gates(self, replica: ReplicaState) -> bool:
        """Return whether the latest report of a replica shows too much load for more requests."""
        report, settings = replica.report, self._settings
        if report is None or not (replica.in_flight if report.running is None else report.running):
            return False
        if report.kv_usage_ratio is not None and report.kv_usage_ratio > settings.kv_gate_ratio:
            return True
        if settings.tpot_gate_s is None or report.tpot_s is None:
            return False
        limit_s = settings.tpot_gate_s
        if replica.reports.least_tpot_s < math.inf:
            # An engine that is slow with few requests gets no faster without more.
            limit_s = max(limit_s, _SLOWER * replica.reports.least_tpot_s)
        return report.tpot_s > (_TPOT_REOPEN_RATIO if replica.gated else 1.0) * limit_s

    def _batch_is_full(self, replica: ReplicaState) -> bool:
        batch = replica.max_num_seqs
        return replica.reported_queue > 0 if batch is None else replica.in_flight >= batch

    def _prefill_backlog_s(self, replica: ReplicaState, *, without_chunked: bool = False) -> float:
        """Return the learned time of the prefills in flight, in seconds.

        Args:
            without_chunked: whether to leave out long prefills that the engine computes in chunks.
        """
        tokens = replica.prefills.tokens
        if without_chunked and replica.spec.long_prefill_token_threshold:
            tokens -= replica.prefills.long_tokens
        return tokens * self._costs.of(replica.spec.pool).per_token_s


def _admits_unseen(replica: ReplicaState) -> bool:
    """Return whether an engine that does not report its queue begins one more request, as far as is known."""
    batch, learned = replica.spec.max_num_seqs, replica.learned.limit
    if batch is not None:
        return replica.in_flight < batch
    return learned is None or learned.admits(replica.in_flight, replica.unstarted)
