"""Routes: names that clients request, in front of served models.

A route divides its requests among models by weight (a canary, an A/B test) and names fallbacks for requests
that the chosen model does not accept. Requests with the same session, or of the same tenant, reach the same
model. A change of weights moves only as many of them as it has to: weighted rendezvous hashing, as in
"Weighted Distributed Hash Tables" (Schindelhauer and Schomaker, 2005).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from hashlib import blake2b
from typing import Annotated, Literal

from msgspec.structs import replace

from serve_app.core.latency_targets import TargetLimits
from serve_app.core.settings_base import ADVANCED, POSITIVE, settings
from serve_app.errors import Outcome, SettingsError
from serve_app.request import Submission
from serve_app.serving.gateway.answer.responses import RequestRejected

# Rejections that say nothing about other models: the queue is full or too slow, no replica is ready, the
# context is too short, or the engine failed.
_FALLS_BACK = frozenset(
    {
        Outcome.REJECTED_QUEUE_FULL,
        Outcome.REJECTED_DEADLINE_UNMEETABLE,
        Outcome.REJECTED_NO_REPLICA,
        Outcome.REJECTED_TOO_LONG,
        Outcome.EXPIRED,
        Outcome.FAILED,
    }
)


@settings
class RouteSettings:
    """A model name that clients may request, and the models that serve it.

    Attributes:
        name: name in requests. It may be the name of a model, which then receives only what the route sends.
        models: models by weight. With weights of 9 and 1, the second one serves a tenth of the requests.
        fallbacks: models to try in this order if the chosen one is saturated or unavailable, or if the
            request exceeds its context. Once a part of an answer was sent, the request is not moved.
        sticky_by: requests that stay with one model: those with the same `x-session-id` or session header of
            an agent (without one, the same end user in the body), or those of the same tenant.
        fallback_after_s: longest wait in the queue of a model while a fallback remains; by default the queue
            timeout.
        latency_target: latency target of requests that state none.
    """

    name: str
    models: Mapping[str, float]
    fallbacks: tuple[str, ...] = ()
    sticky_by: Annotated[Literal["session", "tenant"], ADVANCED] = "session"
    fallback_after_s: Annotated[float | None, POSITIVE, ADVANCED] = None
    latency_target: TargetLimits = field(default_factory=TargetLimits)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty: it is the name that clients send")
        for model, weight in self.models.items():
            if not 0 <= weight < math.inf:
                raise ValueError(
                    f"route {self.name}: the weight of {model} must be 0 or more, got {weight:g}"
                )
        if not any(self.models.values()):
            raise ValueError(f"route {self.name}: give at least one of its models a weight above 0")

    @property
    def members(self) -> tuple[str, ...]:
        """All of its models, fallbacks last."""
        return tuple(dict.fromkeys((*self.models, *self.fallbacks)))

    def check(self, served: Collection[str]) -> None:
        """Raise `SettingsError` if a model of the route is not served."""
        for model in self.members:
            if model not in served:
                close = get_close_matches(model, served, 1)
                remedy = f"did you mean {close[0]!r}?" if close else f"models: {', '.join(served)}"
                raise SettingsError(f"gateway.routes: {self.name} has the unknown model {model!r}; {remedy}")

    def order(self, subject: str, ready: Collection[str] = ()) -> tuple[str, ...]:
        """Return the model for a subject, followed by the fallbacks.

        Args:
            ready: models to choose from; without any that has a weight, all are.
        """
        weights = {model: weight for model, weight in self.models.items() if weight and model in ready}
        weights = weights or dict(self.models)
        chosen = max(weights, key=lambda model: _score(subject, model, weights[model]))
        return tuple(dict.fromkeys((chosen, *self.fallbacks)))

    def subject(self, session: str, user: str | None, tenant: str, request_id: str) -> str:
        """Return the part of a request that selects its model."""
        return tenant if self.sticky_by == "tenant" else session or user or request_id


def _score(subject: str, model: str, weight: float) -> float:
    if not weight:
        return -math.inf
    key = f"{len(model)} {model} {subject}".encode("utf-8", "surrogatepass")
    digest = int.from_bytes(blake2b(key, digest_size=6).digest(), "big")
    # Between 0 and 1, both excluded.
    return -weight / math.log((2 * digest + 1) / 2**49)


class Fallbacks:
    """The further submissions of one request, in the order of their use.

    Args:
        after_s: `RouteSettings.fallback_after_s`.
    """

    __slots__ = ("_after_s", "_rejections", "_remaining")

    def __init__(self, submissions: Sequence[Submission], after_s: float | None) -> None:
        self._after_s = after_s
        self._remaining = list(submissions)
        self._rejections: list[RequestRejected] = []

    @property
    def remain(self) -> bool:
        """True if there is another submission."""
        return bool(self._remaining)

    def following(self, rejection: RequestRejected, waited_s: float) -> Submission:
        """Return the next submission after a rejection.

        Args:
            waited_s: time since the arrival of the request.

        Raises:
            RequestRejected: there is none. Of all rejections, it is the one after which a retry is useful
                first; otherwise that of the first model.
        """
        self._rejections.append(rejection)
        if rejection.outcome not in _FALLS_BACK or not rejection.may_retry:
            raise rejection
        if self._remaining:
            submission = self._remaining.pop(0)
            stated_s = submission.queue_timeout_s
            left_s = None if stated_s is None else stated_s - waited_s
            if left_s is None or left_s > 0:
                submission = replace(submission, queue_timeout_s=left_s)
                return with_limit(submission, self._after_s) if self._remaining else submission
        raise min(self._rejections, key=_retry_after_s)


def with_limit(submission: Submission, after_s: float | None) -> Submission:
    """Return a submission that waits for at most `after_s`; None sets no further limit."""
    stated_s = submission.queue_timeout_s
    if after_s is None or (stated_s is not None and stated_s <= after_s):
        return submission
    return replace(submission, queue_timeout_s=after_s)


def _retry_after_s(rejection: RequestRejected) -> float:
    return math.inf if rejection.retry_after_s is None else rejection.retry_after_s
