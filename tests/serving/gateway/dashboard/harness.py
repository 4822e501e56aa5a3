"""Dashboard test harness: gateway, replaceable live scheduler and engine on one event loop."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_app.core.routing.replica import ReplicaReport
from serve_app.errors import Outcome
from serve_app.serving.api_keys import changed_keys
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from serve_app.serving.gateway.dashboard.pages import Frames
from tests.relay import Relay
from tests.serving.channel.harness import AwaitedClient, scheduler_settings, submission, wait_until
from tests.serving.gateway.builders import MODEL, Engine, serving
from tests.serving.gateway.fleet import Fleet, fleet_of

KEY = "sk-admin"
USAGE = [
    {"day": day, "key": "k1", "model": MODEL, "requests": requests, "prompt_tokens": prompt}
    | {"cached_tokens": 0, "generated_tokens": generated}
    for day, requests, prompt, generated in (("2026-11-25", 2, 50, 7), ("2026-11-26", 3, 12_000, 900))
]
_MOST_PLACES = 200


@dataclass
class DashboardHarness:
    """The parts behind a dashboard page.

    Attributes:
        url: of the gateway, through the relay.
        relay: between the browser and the gateway.
        frames: renderer of the dashboard's frames.
        queries: answers admin queries, by model.
        keys: the file of keys.
    """

    fleet: Fleet
    engine: Engine
    url: str
    relay: Relay
    frames: Frames
    queries: dict[str, Any]
    keys: Path
    _submitted: list[asyncio.Task[Any]] = field(default_factory=list)

    async def pause_dispatch(self, **changes: Any) -> None:
        """Make the replica report draining, and wait for it: the scheduler then dispatches nothing to it."""
        (double,) = self.fleet.fake_replicas
        report = ReplicaReport(received=0, waiting=0, running=8, kv_usage_ratio=0.5, draining=True)
        double.counts = lambda: replace(report, received=len(self.engine.bodies), **changes)
        await wait_until(lambda: (self._report() or {}).get("draining", False))

    async def fill(self) -> int:
        """Fill the replica with requests `f0`, `f1`, ...; return how many it holds."""
        for number in range(_MOST_PLACES):
            self.submit(f"f{number}")
            await wait_until(lambda: self.fleet.core.find(f"f{number}") is not None)  # noqa: B023
            if len(self.fleet.core.queue):
                return number
        raise AssertionError(f"the replica takes {_MOST_PLACES} requests")

    def waiting(self, client_request_id: str) -> bool:
        """Return whether the scheduler knows a request with this client ID."""
        requests = self.fleet.control_plane.live.history.open()
        return any(record.client_request_id == client_request_id for record in requests)

    def end(self, request_id: str) -> None:
        """Finish a running request."""
        self.fleet.client.end(request_id, Outcome.COMPLETED)

    def resume_dispatch(self) -> None:
        """Make the replica report its true state again."""
        (double,) = self.fleet.fake_replicas
        double.counts = lambda: ReplicaReport(
            received=len(self.engine.bodies), waiting=0, running=self.engine.running, kv_usage_ratio=0.1
        )

    async def next_frames(self) -> None:
        """Wait until the page has received a frame that shows the present state."""
        rendered = self.frames.rendered
        await wait_until(lambda: self.frames.rendered >= rendered + 2)

    def submit(self, request_id: str, tokens: int = 40, **changes: Any) -> None:
        """Submit a request in the background; it waits until the harness stops."""
        wanted = submission(request_id, model=MODEL, **changes)
        shape = msgspec.structs.replace(wanted.spec.shape, prompt_tokens=tokens)
        spec = msgspec.structs.replace(wanted.spec, shape=shape)
        wanted = msgspec.structs.replace(wanted, spec=spec)
        self._submitted.append(asyncio.create_task(self.fleet.client.acquire(wanted)))

    async def cancel_submitted(self) -> None:
        """Cancel the requests that still wait."""
        for task in self._submitted:
            task.cancel()
        await asyncio.gather(*self._submitted, return_exceptions=True)

    def _report(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = (
            self.fleet.control_plane.live.status()["replicas"].get("s0", {}).get("report")
        )
        return found


@contextmanager
def frames_every(interval_s: float) -> Iterator[list[Frames]]:
    """Let gateways that are created render frames at this interval; yield their renderers."""
    made: list[Frames] = []

    def make(queries: Any, gateway_id: str, batches: Any) -> Frames:
        made.append(Frames(queries, gateway_id, batches, interval_s))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serve_app.serving.gateway.app.Frames", make)
        yield made


class _Views:
    """Admin view of the scheduler with a substituted usage."""

    def __init__(self, client: AwaitedClient) -> None:
        self._client = client

    async def query(self, name: str, **arguments: Any) -> Any:
        if name == "usage":
            return {"model": MODEL, "rows": USAGE}
        return await self._client.query(name, **arguments)


@asynccontextmanager
async def running_dashboard(keys: Path) -> AsyncIterator[DashboardHarness]:
    """Run the harness with one replica, and an empty file of keys."""
    changed_keys(keys, lambda found: found)
    engine = Engine(token_delay_s=0.01)
    settings = scheduler_settings(model=MODEL, policy="ewsjf")
    async with fleet_of([engine], settings=settings) as fleet:
        served = GatewaySettings(
            models=(ServedModel(name=MODEL),),
            keys=(
                ApiKey(tenant="ops", key=KEY, admin=True, may_act_for_tenants=True),
                ApiKey(tenant="app", key="sk-app"),
            ),
            keys_file=str(keys),
        )

        queries: dict[str, Any] = {MODEL: _Views(fleet.client)}
        with frames_every(0.2) as frames:
            app = Gateway(served, {MODEL: fleet.client}, "gw2", queries)
        async with serving(app) as port:
            relay = Relay(lambda: ("127.0.0.1", port))
            await relay.start()
            app.start_batches(keys.parent / "batches")
            url = f"http://127.0.0.1:{relay.port}"
            harness = DashboardHarness(fleet, engine, url, relay, frames[0], queries, keys)
            yield harness
            await harness.cancel_submitted()
            await relay.stop()
            await app.drain(0.0, 1.0)
        app.close()
