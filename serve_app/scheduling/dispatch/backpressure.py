"""How much may be sent to an engine before it has said what it did with the last.

Question: does this replica's engine have queue in its *own* queue? A request that waits in the engine can no
longer be reordered, so the engine's queue is kept just long enough that it never runs dry.

Two upper bounds on the engine's queue are known at any moment, and the smaller one counts:

- *unstarted*: requests sent whose answer has not begun. Exact and instant for streamed answers; an answer
  that is not streamed begins only when it ends, so there it says little.
- *reported*: what waited in the engine at the last report, plus what was sent since and the report cannot
  have seen. It is as old as the report.

A fixed target starves an engine that starts many requests between two reports, so against the second bound
the target grows to `lag_factor * starts per second * seconds between reports`.

Beyond its queue, a replica is *gated* while it is too busy for more: while its time per output token is above
a limit, until that has clearly fallen again; while its KV cache is nearly full; and while the prompt tokens
under way are more seconds of prefill than a limit. KV use alone says little: it stands near 0.3 while prefill
is saturated.

Source: TNG, "Efficient Request Queueing" (target 3; target - waiting may be sent at once); the growth with
rate and report lag is ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.routing.prefill_cost import PrefillCost
from serve_app.routing.replica_state import ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class BackpressureSettings:
    """Limits on what an engine is sent."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    # Requests in the engine's own queue that dispatch aims for. Higher keeps the engine busier when signals
    # are late; lower leaves more to the scheduler's order.
    target_waiting: int = 3
    # How far the target grows with the replica's own pace: requests started per second times the time
    # between reports, times this. An independent study found 3 to lose nothing with metrics 0.25 s old.
    lag_factor: float = 3.0
    # The same for the batch class: 0 sends batch work only to an engine whose queue is empty.
    batch_target_waiting: int = 0
    # Or to one that has no more prefill under way than so many seconds, as learned from first tokens: less
    # than one iteration takes, so that nobody waits behind it. With 0, one short batch request goes in an
    # iteration that could take ten: batch work alone then reaches half of the throughput (paper's mix, 70B:
    # 11,900 tokens/s, and 22,600 with 0.02), and interactive requests beside it have a p95 TTFT of 1.6 times
    # what they have alone instead of 2.4.
    batch_prefill_s: float = 0.02
    # Time per output token, in seconds, above which nothing more is sent: seven tokens per second are about
    # as many as people read. None never holds anything back.
    tpot_gate_s: float | None = 0.15
    # It opens again below this share of the limit, so that it does not flap.
    tpot_reopen_ratio: float = 0.9
    # Share of the KV cache in use above which nothing more is sent, since the next blocks would be taken by
    # preempting somebody.
    kv_gate_ratio: float = 0.98
    # Seconds of prefill that may be under way on a replica before it gets more, as learned from first tokens.
    # One request may always go, however long.
    max_prefill_backlog_s: float = 4.0
    # A report older than this counts as saturated. Replicas give a sign of life twice a second.
    report_limit_s: float = 2.5
    # Share of the KV cache that may be promised, at the *expected* length of each request. Charging
    # max_tokens instead costs a fifth to a half of the throughput of a KV-bound replica.
    kv_fill_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.target_waiting < 1:
            raise ValueError(f"target_waiting must be at least 1, got {self.target_waiting}")
        if self.batch_prefill_s < 0:
            raise ValueError(f"batch_prefill_s must not be negative, got {self.batch_prefill_s}")
        if self.batch_target_waiting < 0:
            raise ValueError(f"batch_target_waiting must not be negative, got {self.batch_target_waiting}")
        if self.tpot_gate_s is not None and not self.tpot_gate_s > 0:
            raise ValueError(f"tpot_gate_s must be positive, or null for no gate, got {self.tpot_gate_s}")
        if not 0 < self.tpot_reopen_ratio <= 1:
            raise ValueError(f"tpot_reopen_ratio must be above 0 and at most 1, got {self.tpot_reopen_ratio}")
        for name in ("report_limit_s", "kv_fill_ratio", "kv_gate_ratio", "max_prefill_backlog_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.lag_factor < 0:
            raise ValueError(f"lag_factor must not be negative, got {self.lag_factor}")


class EngineBackpressure:
    """The rules, with what has been learned of the cost of prefills."""

    def __init__(self, settings: BackpressureSettings, cost: PrefillCost) -> None:
        self._settings = settings
        self._cost = cost

    def retune(self, settings: BackpressureSettings) -> None:
        """Other limits from now on; whoever keeps replicas by them has to look at each anew."""
        self._settings = settings

    def admits(self, replica: ReplicaState, now: float) -> bool:
        """Whether one more request may be sent to a replica, as far as its engine's queue and batch go."""
        settings = self._settings
        if replica.in_flight >= replica.spec.max_num_seqs + settings.target_waiting:
            return False
        if replica.pending_prefill_tokens * self._cost.per_token_s > settings.max_prefill_backlog_s:
            return False
        # A long prefill has its own limit, and stands in the engine's batch, not in its queue.
        if replica.unstarted - replica.long_prefills[0] < settings.target_waiting:
            return True
        pace = settings.lag_factor * replica.starts.per_s(now) * replica.report_gap_s
        return replica.reported_queue < max(settings.target_waiting, math.ceil(pace))

    def has_empty_queue(self, replica: ReplicaState) -> bool:
        """Whether the batch class may go there: hardly anything can be waiting in the engine."""
        settings = self._settings
        prefill_s = replica.pending_prefill_tokens * self._cost.per_token_s
        # Where the batch is full, whoever comes waits in the engine, however little is to be computed.
        if prefill_s <= settings.batch_prefill_s and replica.in_flight < replica.spec.max_num_seqs:
            return True
        # As in `admits`: long prefills stand in the batch.
        queued = min(max(0, replica.unstarted - replica.long_prefills[0]), replica.reported_queue)
        return queued <= settings.batch_target_waiting

    def gates(self, replica: ReplicaState) -> bool:
        """Whether a replica that has just reported is too busy for more."""
        report, settings = replica.report, self._settings
        if report is None or not report.running:
            return False
        if report.kv_usage_ratio > settings.kv_gate_ratio:
            return True
        if settings.tpot_gate_s is None or report.tpot_s is None:
            return False
        share = settings.tpot_reopen_ratio if replica.gated else 1.0
        return report.tpot_s > share * settings.tpot_gate_s
