"""Fleet for tests: a gateway over HTTP, a live scheduler and scriptable engines on one event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import httpx

from serve_app.core.routing.replica import ReplicaReport
from serve_app.core.settings import SchedulerSettings
from serve_app.engines.engine import ASGIApp
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway import Gateway
from tests.relay import Relay
from tests.serving.channel.harness import AwaitedClient, ControlPlane, FakeReplica, Wire, scheduler_settings

from .builders import MODEL, TOKEN, Engine, gateway, serving

CHANNEL = ChannelSettings(heartbeat_interval_s=0.2, dead_after_s=10.0, gateway_grace_s=5.0, backoff_max_s=0.1)


@dataclass
class Fleet:
    """Everything between a client's connection and the engines.

    Attributes:
        control_plane: the scheduler and its control channel.
        http: a client of the gateway.
        wire: relay between gateway and scheduler, if the fleet has relays.
        relays: relays between gateway and replicas, one per replica, if the fleet has them.
    """

    control_plane: ControlPlane
    gateway: Gateway
    client: AwaitedClient
    fake_replicas: list[FakeReplica]
    http: httpx.AsyncClient
    port: int
    wire: Wire | None
    relays: list[Relay]

    @property
    def core(self) -> Any:
        """Return the scheduling core, for inspection."""
        return self.control_plane.live.core


@asynccontextmanager
async def fleet_of(
    engines: Sequence[ASGIApp],
    *,
    settings: SchedulerSettings | None = None,
    wrap: Callable[[AwaitedClient], Any] = lambda client: client,
    channel: ChannelSettings = CHANNEL,
    relayed: bool = False,
    parts: Mapping[str, Any] = MappingProxyType({}),
    **gateway_settings: Any,
) -> AsyncIterator[Fleet]:
    """Run a fleet of one pool with one replica per engine.

    Args:
        relayed: the gateway reaches scheduler and replicas through relays.
        parts: options of the live scheduler.
    """
    control_plane = ControlPlane(settings or scheduler_settings(model=MODEL), channel)
    async with AsyncExitStack() as stack:
        await control_plane.begin(**parts)
        stack.push_async_callback(control_plane.close)
        ports = [await stack.enter_async_context(serving(engine)) for engine in engines]
        relays = [await _relay(port, stack) for port in ports] if relayed else []
        ports = [relay.port for relay in relays] or ports
        fake_replicas = [
            await _replica(control_plane, f"s{number}", engine, port)
            for number, (engine, port) in enumerate(zip(engines, ports, strict=True))
        ]
        wire = await control_plane.wire() if relayed else None
        client = await control_plane.gateway(wire=wire)
        app = gateway(wrap(client), client, **gateway_settings)
        stack.callback(app.close)
        port = await stack.enter_async_context(serving(app))
        # Unlimited connections: the test's own client must not queue. It closes idle connections before the
        # server does, because the server might close one while a request is being sent.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits)
        )
        yield Fleet(control_plane, app, client, fake_replicas, http, port, wire, relays)


async def _relay(port: int, stack: AsyncExitStack) -> Relay:
    relay = Relay(lambda: ("127.0.0.1", port))
    await relay.start()
    stack.push_async_callback(relay.stop)
    return relay


async def _replica(control_plane: ControlPlane, replica_id: str, engine: ASGIApp, port: int) -> FakeReplica:
    client, double = await control_plane.replica(
        replica_id, prepare=lambda double: _place(double, engine, port)
    )
    del client
    return double


def _place(double: FakeReplica, engine: ASGIApp, port: int) -> None:
    """Point a replica at its engine's port and let it report the engine's counts."""
    double.address = replace(
        double.address,
        host="127.0.0.1",
        port=port,
        token=TOKEN,
        names_responses=not isinstance(engine, Engine) or engine.names_responses,
    )
    if isinstance(engine, Engine):
        double.counts = lambda: ReplicaReport(
            received=len(engine.bodies), waiting=0, running=engine.running, kv_usage_ratio=0.0
        )


async def gathered(*calls: Any) -> list[Any]:
    """Return the results of concurrent calls."""
    return list(await asyncio.gather(*calls))
