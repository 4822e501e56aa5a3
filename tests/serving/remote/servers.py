"""Scripted endpoints, and a fleet that watches them."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from serve_app.core.routing.pools import RoutingSettings
from serve_app.engines.engine import Receive, Scope, Send
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from serve_app.serving.gateway.admin import PoolWatcher
from serve_app.serving.remote.settings import RemoteSettings
from serve_app.serving.remote.watcher import EndpointChoices, EndpointWatcher
from serve_app.serving.state import StateStore
from tests.engines.servers import serving
from tests.serving.channel.harness import ControlPlane, scheduler_settings
from tests.serving.gateway.builders import MODEL, Engine
from tests.serving.gateway.fleet import CHANNEL

POOL = "short"
ADMIN = ApiKey(key="sk-of-the-admin", tenant="ops", admin=True)
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} RUNNING
vllm:num_requests_waiting{engine="0",model_name="tiny"} WAITING
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} STEPS
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} KV_USAGE
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} AWAKE
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} ASLEEP
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
"""


class VllmLike(Engine):
    """Engine with vLLM's metrics and model list.

    Attributes:
        api_key: the required key; empty for none.
        kv_usage, others, queued: load by other clients.
        hangs: the engine makes no progress.
        sleeps: the engine sleeps.
        is_mute: its metrics show no requests, as after a hang while idle.
        metrics_status: status of its metrics page.
        seen: headers of the last request other than control requests.
    """

    def __init__(self, *, token_delay_s: float = 0.0) -> None:
        super().__init__(token_delay_s=token_delay_s)
        self.models: Any = {"data": [{"id": MODEL, "max_model_len": 4096}]}
        self.api_key = ""
        self.kv_usage = 0.0
        self.others = self.queued = 0
        self.steps, self.hangs, self.is_mute = 0, False, False
        self.metrics_status = 200
        self.sleeps = False
        self.scrapes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        path = scope["path"].removeprefix("/below")
        if self.api_key and headers.get(b"authorization") != f"Bearer {self.api_key}".encode():
            await _answer(send, 401, b'{"error":"Unauthorized"}')
        elif path == "/metrics":
            self.scrapes += 1
            running = 0 if self.is_mute else self.running + self.others
            page = METRICS.replace("RUNNING", str(running)).replace("WAITING", str(self.queued))
            page = page.replace("STEPS", str(self.steps if self.hangs else self.scrapes))
            page = page.replace("KV_USAGE", str(self.kv_usage))
            page = page.replace("AWAKE", str(1.0 - self.sleeps)).replace("ASLEEP", str(float(self.sleeps)))
            await _answer(send, self.metrics_status, page.encode())
        elif path == "/v1/models":
            await _answer(send, 200, json.dumps(self.models).encode())
        elif scope["method"] == "GET":
            await _answer(send, 404, b"{}")
        else:
            await super().__call__(scope, receive, send)


async def _answer(send: Send, status: int, body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@dataclass
class WatchedFleet:
    """Endpoints with their watcher, a scheduler and a gateway, without Ray."""

    control_plane: ControlPlane
    watcher: EndpointWatcher
    http: httpx.AsyncClient
    stack: AsyncExitStack = field(repr=False)

    def open(self) -> list[str]:
        """Return the endpoints that receive requests."""
        replicas = self.control_plane.live.status()["replicas"]
        return sorted(name for name, one in replicas.items() if one.get("report") is not None)

    async def send_request(self, **body: Any) -> httpx.Response:
        request_body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, **body}
        return await self.http.post("/v1/completions", json=request_body)

    async def endpoint(self, engine: VllmLike | None = None) -> str:
        """Start one more server; return its URL."""
        return await self.stack.enter_async_context(serving(engine or VllmLike()))


class MemoryStore(StateStore):
    """Store that no other process sees."""

    outlives_cluster = False
    _data: bytes | None = None

    def _read(self) -> bytes | None:
        return self._data

    def _write(self, data: bytes) -> None:
        self._data = data


def new_choices() -> EndpointChoices:
    """Return choices without a history."""
    return EndpointChoices(MemoryStore("memory://none", "endpoints", "none"))


@asynccontextmanager
async def watched(
    *endpoints: str,
    kept: EndpointChoices | None = None,
    start: bool = True,
    model: str = MODEL,
    long: str = "",
    **settings: Any,
) -> AsyncIterator[WatchedFleet]:
    """Run a fleet of these endpoints.

    Args:
        long: endpoint of a second pool; empty for none.
    """
    pools = (POOL, "long") if long else (POOL,)
    control_plane = ControlPlane(
        scheduler_settings(model=model, routing=RoutingSettings(pools=pools)), CHANNEL
    )
    async with AsyncExitStack() as stack:
        await control_plane.begin()
        stack.push_async_callback(control_plane.close)
        remote = RemoteSettings(endpoints=endpoints, **{"start_timeout_s": 5.0, **settings})

        async def show(states: Mapping[str, Any]) -> None:
            control_plane.live.endpoints.update(states)

        watcher = EndpointWatcher(
            POOL, remote, CHANNEL, control_plane.locate_for_replica, kept or new_choices(), show
        )
        stack.push_async_callback(watcher.close)
        if long:
            of_long = RemoteSettings(endpoints=(long,), start_timeout_s=5.0)
            other = EndpointWatcher(
                "long", of_long, CHANNEL, control_plane.locate_for_replica, new_choices(), show
            )
            stack.push_async_callback(other.close)
            await other.start()
        client = await control_plane.gateway()

        async def describe() -> list[dict[str, object]]:
            return watcher.describe()

        served = GatewaySettings(models=(ServedModel(name=model, max_model_len=4096),), keys=(ADMIN,))
        watchers = {(model, POOL): PoolWatcher(describe, watcher.change)}
        app = Gateway(served, {model: client}, "gw", watchers=watchers)
        stack.callback(app.close)
        url = await stack.enter_async_context(serving(app))
        headers = {"authorization": f"Bearer {ADMIN.key}"}
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120, headers=headers))
        if start:
            await watcher.start()
        yield WatchedFleet(control_plane, watcher, http, stack)
