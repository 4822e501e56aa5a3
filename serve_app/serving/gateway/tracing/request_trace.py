"""The interface of a request's trace, and the setup of the tracer."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from serve_app.core.events import DispatchFailure
from serve_app.core.metrics.record import RequestRecord
from serve_app.engines.engine import Scope
from serve_app.errors import Outcome, SettingsError
from serve_app.request import Submission
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


_SAMPLED = 0x01
# A later version may have more behind a further hyphen; version ff is none.
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_NO_TRACE = b"0" * 32
_NO_SPAN = b"0" * 16


class TraceParent(NamedTuple):
    """The span from which a request comes.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
    """

    trace_id: bytes
    span_id: bytes
    flags: int

    @property
    def is_sampled(self) -> bool:
        """Whether whoever sent it keeps the trace."""
        return bool(self.flags & _SAMPLED)


def trace_parent(headers: Mapping[bytes, bytes]) -> TraceParent | None:
    """The parent that a request names; None where it names none, or one that cannot be."""
    given = headers.get(b"traceparent")
    if given is None:
        return None
    found = _TRACEPARENT.fullmatch(given)
    if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN:
        return None
    # Version 00 has nothing behind its flags.
    if given.startswith(b"00") and len(given) != 55:
        return None
    return TraceParent(found[1], found[2], int(found[3], 16))


# The standard ways to switch tracing off from outside.
_OFF = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}


def made_tracer(gateway_id: str) -> RequestTracer | None:
    """The tracer that the environment describes; None where it switches tracing off.

    Raises:
        SettingsError: OpenTelemetry is not installed, or the environment asks for what it has not.
    """
    if any(os.environ.get(name, "").strip().lower() == value for name, value in _OFF.items()):
        return None
    try:
        from serve_app.serving.gateway.tracing.tracer import GatewayTracer, otlp_exporter  # noqa: PLC0415

        return GatewayTracer(gateway_id, otlp_exporter())
    except ImportError as exc:
        raise SettingsError(
            f"gateway.tracing is true, but {exc.name or exc} is not installed: "
            "pip install 'ewsjf-serve[tracing]', or leave gateway.tracing out"
        ) from exc


def check_tracing() -> None:
    """Refuse what `made_tracer` would refuse.

    Raises:
        SettingsError: see there.
    """
    tracer = made_tracer("check")
    if tracer is not None:
        tracer.close(0.0)
