"""A job: a request that has been read, with all that is needed to serve it."""

from dataclasses import dataclass

import msgspec

from serve_app.request import Submission
from serve_app.serving.channel.scheduler_client import Grant
from serve_app.serving.gateway.answer.sse import Announcements
from serve_app.serving.gateway.answer.waiting.queue_updates import QueueForm
from serve_app.serving.gateway.request.held_bodies import HeldBody
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.splice import append_fields, priority_field, response_id_field


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTerms:
    """What a request of the Responses API says of what its engine keeps.

    Attributes:
        owner: the tenant whose response it will be.
        previous: id of the response that it goes on from.
        background: the engine works on after its answer, or after its client has left.
        is_named: its client gives it a name, which must be replaced: it might be another tenant's.
    """

    owner: str
    previous: str | None = None
    background: bool = False
    is_named: bool = False


class ForwardJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done for one client.

    Attributes:
        forwarded: lines of the client's headers for the engine.
        body: as the engine gets it, but for what a grant brings. It is released as soon as it cannot be sent
            again.
        hide_usage: the client did not ask for the usage event that ends the stream.
        assembles: the engine streams, and the client wants the answer in one piece.
        announced: the events with which a stream begins before its first token.
        response: for the Responses API.
        is_form: the body is a form, to which nothing can be added.
        queue_form: how its client wants to be told of the queue; None where it does not ask.
    """

    incoming: IncomingRequest
    submission: Submission
    forwarded: bytes
    body: HeldBody
    hide_usage: bool
    assembles: bool = False
    announced: Announcements | None = None
    response: ResponseTerms | None = None
    is_form: bool = False
    queue_form: QueueForm | None = None

    def body_for(self, grant: Grant, response_id: str | None) -> bytes:
        """The body with what this grant brings; the very same bytes where that is nothing.

        Args:
            response_id: the id that the response gets; None where the engine names it.
        """
        fields = []
        if grant.dispatch.engine_priority is not None and not self.is_form:
            fields.append(priority_field(grant.dispatch.engine_priority))
        if response_id is not None:
            fields.append(response_id_field(response_id))
        return append_fields(self.body.data, fields)
