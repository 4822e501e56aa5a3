"""One response while it is made: its name, where it is kept, and whether it goes on without its client."""

from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.gateway.request.incoming import ResponseTerms
from serve_app.serving.gateway.stored.holders import (
    AnsweredResponse,
    ResponseHolders,
    announced_response,
    answered_response,
)


class KeptResponse:
    """What is known of it.

    Attributes:
        response_id: empty until it is known.
        is_under_way: its engine works on it in the background.
    """

    __slots__ = ("_holders", "_replica", "_terms", "is_under_way", "response_id")

    def __init__(self, terms: ResponseTerms, holders: ResponseHolders) -> None:
        self._terms = terms
        self._holders = holders
        self._replica: ReplicaAddress | None = None
        self.response_id = ""
        self.is_under_way = False

    def name(self, replica: ReplicaAddress) -> str | None:
        """The name that it gets on a replica; None where the engine names it."""
        self._replica = replica
        self.response_id = ""
        if not (replica.names_responses or self._terms.is_named):
            return None
        self.response_id = self._holders.name(self._terms.owner, replica)
        return self.response_id

    def on_answer(self, body: bytes) -> None:
        """The engine has answered in one piece."""
        if self._terms.background or self._may_be_named_otherwise:
            self._note(answered_response(body))

    def on_first_events(self, events: bytes) -> None:
        """The engine's stream has begun."""
        if self._terms.background or self._may_be_named_otherwise:
            self._note(announced_response(events))

    @property
    def _may_be_named_otherwise(self) -> bool:
        return self._replica is not None and not self._replica.names_responses

    def _note(self, response: AnsweredResponse) -> None:
        if not response.id:
            return
        assert self._replica is not None, "it has been sent"
        if response.id != self.response_id:
            self._holders.remember(response.id, self._terms.owner, self._replica.replica_id)
        # An engine may have named it otherwise.
        self.response_id = response.id
        self.is_under_way = self._terms.background and response.is_under_way
