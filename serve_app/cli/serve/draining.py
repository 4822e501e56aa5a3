"""Drain of an application's gateways: new requests are rejected, in-flight ones are completed or aborted."""

import time
from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from serve_app.cli.serve.messages import Draining, HostMessage, Stop

CALL_TIMEOUT_S = 10.0
# Gateways abort the remaining requests themselves at the deadline. The margin is for their response.
_DRAIN_MARGIN_S = 5.0
_DRAIN_POLL_S = 0.5


def drain_gateways(
    gateway: "DeploymentHandle[Any]", stop: Stop, on_progress: Callable[[HostMessage], None]
) -> int:
    """Drain every gateway and report the progress to `on_progress`.

    Returns:
        The number of in-flight requests that were aborted with an error at the deadline.
    """
    deadline = time.monotonic() + stop.drain_s
    # A broadcast is sent only when its results are requested, so the drain itself must not be awaited here.
    gateway.broadcast("begin_drain", stop.drain_s, stop.retry_after_s).results(timeout_s=CALL_TIMEOUT_S)
    while True:
        remaining_s = max(0.0, deadline - time.monotonic())
        counts = gateway.broadcast("open_requests").results(timeout_s=CALL_TIMEOUT_S)
        on_progress(Draining(sum(counts), remaining_s))
        if not sum(counts) or not remaining_s:
            break
        time.sleep(min(_DRAIN_POLL_S, remaining_s))
    return sum(gateway.broadcast("end_drain").results(timeout_s=_DRAIN_MARGIN_S))
