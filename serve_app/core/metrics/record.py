"""The record of one request: raw timestamps on one clock, and the latencies that follow from them."""

from dataclasses import dataclass

from serve_app.errors import Outcome
from serve_app.request import PriorityClass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request from its arrival to its one outcome, as the simulator, the gateway or a client saw it.

    All times are seconds on the observer's clock; only differences count.

    Attributes:
        arrived_at: for an open-loop client the scheduled time, not that of sending: the delay of a late
            client is waiting too.
        sent_at: when an open-loop client really sent it; None where arriving and sending are one.
        dispatched_at: when it left the queue for an engine; None when it never did, or is not known.
        first_token_at: when the first generated token arrived; None without one, and for unstreamed answers.
        finished_at: when it reached its outcome.
        prompt_tokens: as the engine counted them, or as asked for when it gave no count.
        output_tokens: generated so far, also for requests that did not complete.
        preemptions: how often the engine preempted it, which loses its computed KV cache.
        detail: why it did not complete, for a reader.
    """

    request_id: str
    arrived_at: float
    finished_at: float
    outcome: Outcome
    prompt_tokens: int
    output_tokens: int
    sent_at: float | None = None
    dispatched_at: float | None = None
    first_token_at: float | None = None
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.DEFAULT
    pool: str = ""
    replica: str = ""
    length_queue: str = ""
    estimated_tokens: int | None = None
    preemptions: int = 0
    detail: str = ""

    @property
    def completed(self) -> bool:
        """Whether the client got its whole answer."""
        return self.outcome is Outcome.COMPLETED

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival: `first_token_at - arrived_at`."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: `(finished_at - first_token_at) / (output_tokens - 1)`."""
        if self.first_token_at is None or self.output_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """End to end, from arrival: `finished_at - arrived_at`."""
        return self.finished_at - self.arrived_at

    @property
    def queue_wait_s(self) -> float | None:
        """Time in the queue: `dispatched_at - arrived_at`."""
        return None if self.dispatched_at is None else self.dispatched_at - self.arrived_at

    @property
    def schedule_lag_s(self) -> float:
        """How late the client sent it: `sent_at - arrived_at`; large values mean a saturated client."""
        return 0.0 if self.sent_at is None else self.sent_at - self.arrived_at
