"""The events of an engine's stream as the forwarder takes them, and what the stream says at its end."""

from serve_app.errors import Outcome
from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.gateway.answer.engine_answer import is_dead
from serve_app.serving.gateway.answer.sse import Announcements, StreamScanner
from serve_app.serving.gateway.upstream.response import UpstreamError, UpstreamResponse


async def first_events(
    response: UpstreamResponse, scanner: StreamScanner, announced: Announcements | None
) -> bytes:
    """The events up to the first that tells of work done; others say that the request has been read.

    Some APIs begin every stream with those. Passed on at once they would commit the client to this engine
    before the prefill, and count as its first token.

    Args:
        announced: the events with which this API begins; None where the first one tells of work.
    """
    events = await next_events(response, scanner)
    while announced is not None and announced.are_all(events) and not response.at_end:
        events += await next_events(response, scanner)
    return events


async def next_events(response: UpstreamResponse, scanner: StreamScanner) -> bytes:
    """The next events for the client; empty only at the end of the stream."""
    while True:
        events = scanner.feed(await response.next())
        if response.at_end:
            return events + scanner.flush()
        if events:
            return events


def engine_failure(scanner: StreamScanner) -> UpstreamError:
    """The error that an engine reported inside its stream."""
    said = scanner.error or ""
    kind = DispatchFailure.LOST if is_dead(said) else DispatchFailure.ENGINE_ERROR
    return UpstreamError(kind, f"the engine failed: {said}")


def stream_outcome(scanner: StreamScanner) -> Outcome:
    """How a request ended whose stream is complete."""
    if scanner.error is None:
        return Outcome.COMPLETED
    return Outcome.FAILED if scanner.error_is_engines else Outcome.REJECTED_INVALID
