"""Gateways in this process, on an event loop of its own, before one engine and without a scheduler.

A stand-in grants every request at once: its cost is the same in each way, and next to nothing.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import uvicorn
import uvloop

from experiments.common.light_endpoint import MODEL
from experiments.overhead.client import KEY
from serve_app.errors import Conclusion, Outcome
from serve_app.request import Submission, Usage
from serve_app.scheduling.commands import Dispatch
from serve_app.scheduling.events import DispatchFailure
from serve_app.serving.channel.scheduler_client import Grant, ReplicaAddress, RequestOutlook, RequestTimes
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from serve_app.serving.gateway.front.connection import FrontEndConnection

OFF, CONTROL, UNSAMPLED, SAMPLED = "off", "off, a second one", "on, not sampled", "on, sampled"
_RATIO = {UNSAMPLED: "0", SAMPLED: "1"}


class GrantsAll:
    """A scheduler with one replica that takes everything."""

    is_connected = True

    def __init__(self, port: int) -> None:
        self._address = ReplicaAddress(replica_id="r", pool="all", host="127.0.0.1", port=port, token="")

    async def acquire(self, submission: Submission, client_request_id: str = "") -> Grant | Conclusion:
        """Leave to go."""
        del client_request_id
        dispatch = Dispatch(
            request_id=submission.request_id,
            gateway_id="g",
            replica_id="r",
            pool="all",
            length_queue="all",
            estimated_tokens=64,
            queue_wait_s=0.0,
        )
        return Grant(dispatch, self._address)

    async def put_back(
        self, request_id: str, replica_id: str, failure: DispatchFailure, message: str = ""
    ) -> Grant | Conclusion:
        """Nothing may fail here."""
        raise AssertionError(f"{request_id} came back from {replica_id}: {failure} {message}")

    def watch(self, request_id: str, on_outlook: Callable[[RequestOutlook | None], None]) -> None:
        """Nobody waits."""

    def first_token(self, request_id: str) -> None:
        """Nobody hears of it."""

    def finish(
        self,
        request_id: str,
        outcome: Outcome,
        usage: Usage | None = None,
        times: RequestTimes | None = None,
    ) -> None:
        """Nobody hears of it."""

    def note_end(self, request_id: str, outcome: Outcome, times: RequestTimes) -> None:
        """Nobody hears of it."""

    def replicas(self) -> tuple[ReplicaAddress, ...]:
        """The one."""
        return (self._address,)

    def all_replicas(self) -> tuple[ReplicaAddress, ...]:
        """The same."""
        return (self._address,)

    def adapters(self) -> Mapping[str, frozenset[str]]:
        """None."""
        return {}

    async def exposition(self) -> str:
        """Nothing."""
        return ""

    def show(self, own_page: Callable[[], Awaitable[str]]) -> None:
        """Nobody asks."""


class _Everything:
    """As behind HAProxy: whatever comes is for the gateway."""

    def prefix_of(self, path: str) -> str | None:  # noqa: ARG002 - the same for all
        return ""


class _Connection(FrontEndConnection):
    """As in production, but for Ray Serve."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.ingress = _Everything()


@contextmanager
def started_gateways(engine_port: int, collector: str) -> Iterator[dict[str, str]]:
    """The addresses of four gateways, by how they trace."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gateways", daemon=True)
    thread.start()

    def run(call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop).result(60.0)

    try:
        with ExitStack() as stack:
            urls = {}
            for way in (OFF, CONTROL, UNSAMPLED, SAMPLED):
                gateway = _gateway(way, engine_port, collector)
                stack.callback(loop.call_soon_threadsafe, gateway.close)
                server, urls[way] = run(served(gateway))
                stack.callback(lambda one: run(one.shutdown()), server)
            yield urls
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)


def _gateway(way: str, engine_port: int, collector: str) -> Gateway:
    settings = GatewaySettings(
        models=(ServedModel(name=MODEL, max_model_len=32_768),),
        keys=(ApiKey(tenant="bench", key=KEY),),
        tracing=way in _RATIO,
        # Lines cost the same in each way, and here they would go to a terminal.
        log_requests=False,
    )
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": _RATIO.get(way, "0"),
        # Else spans are dropped under this load, and what is dropped costs less.
        "OTEL_BSP_MAX_QUEUE_SIZE": "200000",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with patch.dict(os.environ, environment):
        return Gateway(settings, {MODEL: GrantsAll(engine_port)}, f"g-{way}")


async def served(gateway: Gateway) -> tuple[uvicorn.Server, str]:
    """Serve a gateway on a port of its own; returns its address, too."""
    config = uvicorn.Config(
        gateway,
        host="127.0.0.1",
        port=0,
        http=partial(_Connection, gateway),  # type: ignore[arg-type]  # whatever makes a connection
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    await server.on_tick(0)
    return server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
