"""Who is let into the queue. Refusals at the door are immediate, and say what would have to change."""

from dataclasses import dataclass

from serve_app.errors import Outcome
from serve_app.request import Request
from serve_app.routing.estimate import TokenEstimate
from serve_app.routing.pools import least_budget_tokens
from serve_app.scheduling.settings import SchedulerSettings


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in.

    Attributes:
        retry: coming again later may help.
    """

    outcome: Outcome
    message: str
    retry: bool = False


class Admission:
    """The checks at the door, in the order in which they are named to the client."""

    def __init__(self, settings: SchedulerSettings, now: float) -> None:
        self._settings = settings
        self._names = frozenset((settings.model, *settings.aliases))
        # Since when there has been no replica at all; None while there is one.
        self._bare_since: float | None = now

    def replicas_changed(self, joined: int, now: float) -> None:
        """Note how many replicas are connected."""
        if joined:
            self._bare_since = None
        elif self._bare_since is None:
            self._bare_since = now

    def refuse_unknown(self, request: Request) -> Refusal | None:
        """Whether the model is served here at all."""
        if request.model in self._names:
            return None
        return Refusal(
            Outcome.REJECTED_UNKNOWN_MODEL,
            f"model {request.model!r} is not served here; served: {', '.join(sorted(self._names))}",
        )

    def refuse(self, waiting: int, now: float) -> Refusal | None:
        """Whether there is anybody to serve it, and room to wait."""
        if self._bare_since is not None and now - self._bare_since > self._settings.no_replica_grace_s:
            return Refusal(
                Outcome.REJECTED_NO_REPLICA,
                f"no replica of {self._settings.model} has been available for {now - self._bare_since:.0f} s",
                retry=True,
            )
        if waiting >= self._settings.max_waiting:
            return Refusal(
                Outcome.REJECTED_QUEUE_FULL,
                f"the queue of {self._settings.model} is full: {waiting} requests wait already",
                retry=True,
            )
        return None


def too_long(request: Request, estimate: TokenEstimate, limit: int | None) -> Refusal:
    """The refusal of a request that no pool can hold.

    Args:
        limit: the longest context limit there is, in tokens.
    """
    least = least_budget_tokens(request, estimate)
    return Refusal(
        Outcome.REJECTED_TOO_LONG,
        f"This model's maximum context length is {limit} tokens, and the request needs at least {least}: "
        f"about {estimate.expected_prompt_tokens} in the prompt, {request.max_output_tokens or 0} asked for "
        "as output. Shorten the prompt or lower max_tokens.",
    )
