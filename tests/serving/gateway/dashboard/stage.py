"""A gateway with a page, a live scheduler that may be replaced, and an engine, all on one event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.core.routing.replica import ReplicaReport
from serve_app.errors import Outcome
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from serve_app.tuning.counterfactuals.recording import encode_recording
from tests.serving.channel.harness import scheduler_settings, submission, until
from tests.serving.gateway.builders import MODEL, Engine, serving
from tests.serving.gateway.fleet import Fleet, fleet_of
from tests.tuning.counterfactuals.production import burst, produce

KEY = "sk-admin"
OVERLOAD = produce(burst(60, 0)).recording("r50")
_MOST_PLACES = 200


@dataclass
class PageStage:
    """Everything that a page shows.

    Attributes:
        url: of the gateway.
        app: the gateway, to be looked at.
    """

    fleet: Fleet
    engine: Engine
    url: str
    app: Gateway
    _asked: list[asyncio.Task[Any]] = field(default_factory=list)

    def hold(self) -> None:
        """Let the replica say that it drains, so that the scheduler sends it nothing more."""
        (double,) = self.fleet.doubles
        double.counts = lambda: ReplicaReport(
            received=len(self.engine.bodies), waiting=0, running=8, kv_usage_ratio=0.5, draining=True
        )

    async def fill(self) -> int:
        """Take all places of the replica by requests `f0`, `f1` and so on; return how many there are."""
        for number in range(_MOST_PLACES):
            self.submit(f"f{number}")
            await until(lambda: f"f{number}" in self.fleet.world.live._gateways.book)  # noqa: B023
            if len(self.fleet.core.queue):
                return number
        raise AssertionError(f"the replica takes {_MOST_PLACES} requests")

    def waiting(self, client_request_id: str) -> bool:
        """Whether the scheduler has a request to which its client gave this id."""
        book = self.fleet.world.live._gateways.book
        return any(record.client_request_id == client_request_id for record in book.values())

    def end(self, request_id: str) -> None:
        """Let a request that has a place give it back."""
        self.fleet.client.finish(request_id, Outcome.COMPLETED)

    def release(self) -> None:
        """Let it tell the truth again."""
        (double,) = self.fleet.doubles
        double.counts = lambda: ReplicaReport(
            received=len(self.engine.bodies), waiting=0, running=self.engine.running, kv_usage_ratio=0.1
        )

    async def held(self) -> None:
        """Wait until the scheduler has heard of that."""
        async with asyncio.timeout(20):
            while not (self._report() or {}).get("draining"):  # noqa: ASYNC110 - reports come by themselves
                await asyncio.sleep(0.01)

    def submit(self, request_id: str, tokens: int = 40, **changes: Any) -> None:
        """Ask for a turn, and wait for it until the stage is taken down."""
        asked = submission(request_id, model=MODEL, **changes)
        shape = replace(asked.spec.shape, prompt_tokens=tokens)
        asked = replace(asked, spec=replace(asked.spec, shape=shape))
        self._asked.append(asyncio.create_task(self.fleet.client.acquire(asked)))

    async def forget(self) -> None:
        """Give up what still waits."""
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)

    def _report(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.fleet.world.live.status()["replicas"].get("s0", {}).get("report")
        return found


class _Views:
    """The scheduler, as admins see it, but for recordings.

    A page with one request has too few to compare it with: those of a simulated overload stand in.
    """

    def __init__(self, client: GatewayClient) -> None:
        self._client = client

    async def ask(self, question: str, **arguments: Any) -> Any:
        found = await self._client.ask(question, **arguments)
        return encode_recording(OVERLOAD) if question == "recording" and found else found


@asynccontextmanager
async def page_stage() -> AsyncIterator[PageStage]:
    """All of it, with one replica."""
    engine = Engine(token_delay_s=0.01)
    settings = scheduler_settings(model=MODEL, policy="ewsjf")
    async with fleet_of([engine], settings=settings) as fleet:
        served = GatewaySettings(
            models=(ServedModel(name=MODEL),),
            keys=(
                ApiKey(tenant="ops", key=KEY, admin=True, may_act_for_tenants=True),
                ApiKey(tenant="app", key="sk-app"),
            ),
        )

        app = Gateway(served, {MODEL: fleet.client}, "gw2", {MODEL: _Views(fleet.client)})
        async with serving(app) as port:
            stage = PageStage(fleet, engine, f"http://127.0.0.1:{port}", app)
            yield stage
            await stage.forget()
        app.close()
