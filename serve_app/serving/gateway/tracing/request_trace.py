"""What happens to a request, told to its trace. For a request that is not sampled nobody listens."""

from collections.abc import Mapping
from typing import Protocol

from serve_app.engines.engine import Scope
from serve_app.errors import Outcome
from serve_app.metrics.record import RequestRecord
from serve_app.request import Submission
from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.channel.scheduler_client import Grant


class RequestTrace:
    """The trace of a request that is not sampled.

    Attributes:
        trace_id: 32 hexadecimal digits; empty for a request that is not sampled.
    """

    __slots__ = ()

    trace_id: str = ""

    def queued(self, submission: Submission) -> None:
        """It goes to its scheduler."""

    def granted(self, grant: Grant, attempt: int) -> None:
        """It has been given a place on a replica, and is sent there."""

    def headers(self) -> bytes:
        """Lines for the engine, so that its spans stand below that of the present attempt."""
        return b""

    def put_back(self, failure: DispatchFailure) -> None:
        """The replica has not answered it: it goes back to its queue."""

    def forwarded(self, outcome: Outcome) -> None:
        """The engine has finished with it."""

    def ended(self, record: RequestRecord, status: int) -> None:
        """It has reached its outcome.

        Args:
            status: of HTTP, as the client got it.
        """


UNTRACED = RequestTrace()


class RequestTracer(Protocol):
    """Decides which requests are sampled."""

    def begin(
        self, scope: Scope, path: str, headers: Mapping[bytes, bytes], arrived_at: float
    ) -> RequestTrace:
        """The trace of a request that has just arrived; `UNTRACED` if it is not sampled.

        Args:
            arrived_at: on the monotonic clock, in seconds.
        """
        ...

    def unsampled_parent(self) -> bytes:
        """A line that tells an engine of a trace that nobody keeps."""
        ...

    def close(self, within_s: float) -> None:
        """Send what is left; blocks for so long at most."""
        ...
