"""The record of one request: raw timestamps on one clock, and the latencies computed from them."""

import msgspec

from serve_app.errors import Outcome
from serve_app.request import PriorityClass


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request from arrival to outcome, as recorded by the simulator, the gateway or a client.

    All times are seconds on the observer's clock; only differences are meaningful.

    Attributes:
        arrived_at: for an open-loop client the scheduled time, not the time of sending, because the delay of
            a late client counts as waiting.
        sent_at: time at which an open-loop client sent it; None if it equals the arrival.
        dispatched_at: time of dispatch; None if it was never dispatched or the time is unknown.
        first_token_at: arrival of the first generated token; None without one, and for unstreamed answers.
        prompt_tokens: as counted by the engine, or as requested if there is no count.
        output_tokens: tokens generated so far, also for requests that did not complete.
        preemptions: preemptions in the engine, each of which loses its computed KV cache.
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
        """True if the client received the whole answer."""
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
        """End-to-end latency, from arrival: `finished_at - arrived_at`."""
        return self.finished_at - self.arrived_at

    @property
    def queue_wait_s(self) -> float | None:
        """Queue time: `dispatched_at - arrived_at`."""
        return None if self.dispatched_at is None else self.dispatched_at - self.arrived_at

    @property
    def schedule_lag_s(self) -> float:
        """Delay of the client's sending: `sent_at - arrived_at`. Large values mean a saturated client."""
        return 0.0 if self.sent_at is None else self.sent_at - self.arrived_at
