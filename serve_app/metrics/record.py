"""What happened to one request: raw timestamps on one clock, and the times that follow from them."""

from dataclasses import dataclass

from serve_app.errors import Outcome
from serve_app.request import PriorityClass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request from its arrival to its one outcome, as the simulator, the gateway or a client saw it.

    All times are seconds on one clock; which clock is the observer's business, differences are what counts.

    Attributes:
        arrived_at: when the request came to be. For an open-loop client that is the moment on the schedule,
            not the moment of sending: what a late client adds is waiting too.
        sent_at: when an open-loop client really sent it; None where arriving and sending are one.
        dispatched_at: when it left the queue for an engine; None when it never did, or nobody can know.
        first_token_at: when the first generated token came; None without one, and for unstreamed answers.
        finished_at: when it reached its outcome.
        prompt_tokens: as the engine counted them, or as asked for when it gave no count.
        output_tokens: generated so far, also for requests that did not complete.
        preemptions: how often the engine threw its work away and began again.
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
