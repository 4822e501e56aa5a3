"""A pending request at its gateway, and the refusals that a gateway gives without asking the scheduler."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.errors import Conclusion, Outcome
from serve_app.request import Submission
from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.channel.messages import Granted, PutBack, Running, Submit
from serve_app.serving.channel.scheduler_client import Grant, RequestOutlook

# What a client should wait while a scheduler is being replaced, which takes a few seconds.
AWAY_RETRY_AFTER_S = 2.0
REFUSES_TO_WAIT = "the scheduler is away, and the request does not wait"
# More than any prompt has; keeps a submission far below the size of a frame.
_MAX_PREFIX_HASHES = 8192
_MAX_NAME_CHARS = 4096


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request.

    Attributes:
        born_at: when it came in, on this gateway's clock.
        answer: what its handler waits for, or waited for last.
        client_request_id: the id that its client gave it; empty for none.
        grants: how many it has seen.
        replica_id: where it runs; None while it waits.
        started: its answer has begun.
        put_back: how the last grant ended; None before one, and while it runs.
        on_outlook: who wants to know how it stands in the queue; None where nobody asks.
    """

    submission: Submission
    born_at: float
    answer: asyncio.Future[Grant | Conclusion]
    client_request_id: str = ""
    grants: int = 0
    replica_id: str | None = None
    started: bool = False
    put_back: PutBack | None = None
    on_outlook: Callable[[RequestOutlook | None], None] | None = None

    @property
    def request_id(self) -> str:
        """Its name on the channel."""
        return self.submission.request_id

    @property
    def waits(self) -> bool:
        """Whether it has no grant."""
        return self.replica_id is None

    def run(self, message: Granted) -> None:
        """Go on by a grant."""
        self.grants, self.replica_id = message.grant, message.dispatch.replica_id
        self.started, self.put_back = False, None

    def wait(self, failure: DispatchFailure, message: str) -> PutBack:
        """Give the grant back; return what the scheduler is to be told."""
        assert self.replica_id is not None, "only a running request is put back"
        self.put_back = PutBack(self.request_id, self.replica_id, failure, message, self.grants)
        self.replica_id, self.started = None, False
        return self.put_back

    def described(self, now: float) -> Submit | Running:
        """Return its line in a snapshot."""
        age_s = now - self.born_at
        named = self.client_request_id
        if self.replica_id is None:
            return Submit(self.submission, age_s, age_s, self.grants, self.put_back, named)
        return Running(self.submission, age_s, self.grants, self.replica_id, self.started, named)

    def answer_with(self, answer: Grant | Conclusion) -> None:
        """Answer its handler, unless that has gone."""
        if not self.answer.done():
            self.answer.set_result(answer)


def refuse_away(text: str) -> Conclusion:
    """Nobody is there to schedule it, for the moment."""
    return Conclusion(Outcome.REJECTED_NO_REPLICA, text, AWAY_RETRY_AFTER_S)


def refuse_oversized(submission: Submission) -> Conclusion | None:
    """Refuse what would not fit a frame."""
    hashes = len(submission.prefix)
    name = max(len(submission.request_id), len(submission.spec.model), len(submission.tenant))
    if hashes <= _MAX_PREFIX_HASHES and name <= _MAX_NAME_CHARS:
        return None
    text = (
        f"a request may have {_MAX_PREFIX_HASHES} prefix hashes and names of {_MAX_NAME_CHARS} characters; "
        f"this one has {hashes}, and a name of {name}"
    )
    return Conclusion(Outcome.REJECTED_INVALID, text)


def refuse_alone(submission: Submission, pending: int, limit: int) -> Conclusion | None:
    """Refuse, while no scheduler is there, what would not wait or would be one too many."""
    if submission.no_wait:
        return refuse_away(REFUSES_TO_WAIT)
    if pending < limit:
        return None
    text = f"the scheduler is away, and {pending} requests wait for it at this gateway already"
    return Conclusion(Outcome.REJECTED_QUEUE_FULL, text, AWAY_RETRY_AFTER_S)
