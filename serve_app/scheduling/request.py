"""A request inside the scheduler, from the moment it is let in to its outcome."""

import math
from dataclasses import dataclass

from serve_app.request import Request
from serve_app.routing.estimation.estimate import TokenEstimate
from serve_app.routing.replica_state import Hold, PrefillClass
from serve_app.scheduling.prediction import Prediction

NOTHING = Hold(0)


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One request, waiting or running.

    Attributes:
        sequence: order in which requests were let in; breaks ties.
        pools: pools that may serve it, its home first.
        expires_at: when its time in the queue is over.
        length_queue: the queue that it waits in, or was taken from.
        returned: it came back from a replica and goes before all that were never sent.
        claimed: it was refused before, came back when it was told to, and goes before others for it.
        attempts: replicas that it was lost on.
        above_tokens: context limit of the longest engine that refused it as too long.
        queued: it stands in the waiting room.
        replica_id: where it runs; None while it waits, and when it is over.
        counted_at: when it came, by the clock of the router's demand.
        hold: what its replica's ledger holds for it.
        engine_priority: what its engine was told, None for nothing.
        prefill_class: of its whole prefill by the boundaries of when it was let in, see `isolation`.
        cached_tokens: of its prompt, on the replica where it runs; while it waits, where most of it is.
        dispatched_at: when it was sent to that replica.
        dispatch_number: how many requests that replica had been sent then, this one included.
        prefilled_alone: no other prefill was under way on that replica when it was sent.
        started: its answer has begun.
        charged: what its tenant has been charged for it.
        prediction: what was said of its wait when it came; None when nothing could be, or it came back.
    """

    request: Request
    estimate: TokenEstimate
    sequence: int
    pools: tuple[str, ...]
    expires_at: float = math.inf
    length_queue: str = ""
    returned: bool = False
    claimed: bool = False
    attempts: int = 0
    above_tokens: int = 0
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
    charged: float = 0.0
    prediction: Prediction | None = None

    @property
    def prefill_tokens(self) -> int:
        """Tokens of its prompt that are to be computed, as expected; at least 1."""
        return max(1, self.estimate.expected_prompt_tokens - self.cached_tokens)

    def __repr__(self) -> str:
        place = f"waiting in {self.length_queue}" if self.queued else f"running on {self.replica_id}"
        return f"<ScheduledRequest {self.request.request_id} {self.estimate.budget_tokens} tokens {place}>"
