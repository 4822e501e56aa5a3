"""How much may be sent to an engine before it has said what it did with the last.

Question: does this replica's engine have room in its *own* queue? A request that waits in the engine can no
longer be reordered, so the engine's queue is kept just long enough that it never runs dry.

Two upper bounds on the engine's queue are known at any moment, and the smaller one counts:

- *unstarted*: requests sent whose answer has not begun. Exact and instant for streamed answers; an answer
  that is not streamed begins only when it ends, so there it says little.
- *reported*: what waited in the engine at the last report, plus what was sent since and the report cannot
  have seen. It is as old as the report.

A fixed target starves an engine that starts many requests between two reports, so against the second bound
the target grows to `lag_factor * starts per second * seconds between reports`.

Source: TNG, "Efficient Request Queueing" (target 3; target - waiting may be sent at once); the growth with
rate and report lag is ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_app.routing.ledger import ReplicaState


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
    # A report older than this counts as saturated. Replicas give a sign of life twice a second.
    report_limit_s: float = 2.5
    # Share of the KV cache that may be promised, at the *expected* length of each request. Charging
    # max_tokens instead costs a fifth to a half of the throughput of a KV-bound replica.
    kv_fill_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.target_waiting < 1:
            raise ValueError(f"target_waiting must be at least 1, got {self.target_waiting}")
        for name in ("report_limit_s", "kv_fill_ratio"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.lag_factor < 0:
            raise ValueError(f"lag_factor must not be negative, got {self.lag_factor}")

    def admits(self, replica: ReplicaState, now: float) -> bool:
        """Whether one more request may be sent to a replica, as far as its engine's queue and batch go."""
        if replica.in_flight >= replica.spec.max_num_seqs + self.target_waiting:
            return False
        # A long prefill has its own limit, and stands in the engine's batch, not in its queue.
        if replica.unstarted - replica.long_prefills[0] < self.target_waiting:
            return True
        pace = self.lag_factor * replica.starts.per_s(now) * replica.report_gap_s
        return replica.reported_queue < max(self.target_waiting, math.ceil(pace))
