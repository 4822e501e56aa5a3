"""A gateway, a scheduler and a replica in this process, in front of a running engine."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from serve_app.engines.engine import ASGIApp, Engine, EngineLimits, EngineLoad
from serve_app.serving.gateway import Gateway, GatewaySettings, ServedModel, UpstreamSettings
from serve_app.serving.pool import PoolReplica, PoolReplicaSettings, ReplicaServerSettings
from tests.engines.servers import serving
from tests.engines.vllm.real import ANSWER_TIMEOUT_S, Prompt
from tests.serving.channel.harness import FAST, ControlPlane, scheduler_settings


@dataclass(frozen=True)
class ClientView:
    """A client's view of one answer.

    Attributes:
        end: `answered`, `error event`, `cut`, or the code of a rejection.
        tokens: number of received tokens.
    """

    end: str
    tokens: int = 0


@dataclass(frozen=True)
class ServingStack:
    """Processes in front of the engine, and a client."""

    replica: PoolReplica
    control_plane: ControlPlane
    http: httpx.AsyncClient

    def start(self, *, stream: bool, tokens: int, prompt: Prompt = "Hi") -> "asyncio.Task[ClientView]":
        """Send a request; its length must be unique in the test, because it identifies the answer."""
        return asyncio.create_task(self.ask(stream=stream, tokens=tokens, prompt=prompt))

    async def ask(self, *, stream: bool, tokens: int, prompt: Prompt = "Hi") -> ClientView:
        """Send a request and return its answer."""
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": stream, "ignore_eos": True}
        url, document = "/v1/completions", {**body, "return_token_ids": True}
        if not stream:
            answer = await self.http.post(url, json=document)
            content = answer.json()
            if answer.status_code != 200:
                return ClientView(str(content["error"]["code"]))
            return ClientView("answered", len(content["choices"][0]["token_ids"]))
        async with self.http.stream("POST", url, json=document) as answer:
            # A stream with a long queue time gets comments that keep it open.
            lines = [
                line.removeprefix("data: ")
                async for line in answer.aiter_lines()
                if line and not line.startswith(":")
            ]
        if answer.status_code != 200:
            return ClientView(str(json.loads(lines[0])["error"]["code"]))
        return _streamed(lines)

    async def has_no_replica(self) -> bool:
        """Return whether the scheduler has no available replica."""
        return not self.control_plane.live.status()["replicas"]

    async def waits(self) -> bool:
        """Return whether a request is queued in the scheduler."""
        return bool(sum(self.control_plane.live.status()["waiting"].values()) > 0)


@contextlib.asynccontextmanager
async def serving_stack(
    engine: Engine,
    limits: EngineLimits,
    no_replica_grace_s: float = 1.0,
    *,
    tracing: bool = False,
    **scheduler: Any,
) -> AsyncIterator[ServingStack]:
    """Start gateway, scheduler and replica in front of a running engine, which outlives them.

    Args:
        scheduler: further settings of the scheduler.
    """
    settings = scheduler_settings(model="m", no_replica_grace_s=no_replica_grace_s, **scheduler)
    control_plane = ControlPlane(settings, FAST)
    async with contextlib.AsyncExitStack() as exits:
        await control_plane.begin()
        exits.push_async_callback(control_plane.close)
        of_replica = PoolReplicaSettings(
            pool="short",
            drain_timeout_s=1.0,
            health_timeout_s=10.0,
            server=ReplicaServerSettings(),
            channel=FAST,
        )
        replica = PoolReplica(
            "r", "127.0.0.1", of_replica, _Running(engine, limits), control_plane.locate_for_replica
        )
        await replica.start()
        exits.push_async_callback(replica.stop)
        served = GatewaySettings(
            models=(ServedModel(name="m", max_model_len=limits.max_model_len),),
            upstream=UpstreamSettings(silence_timeout_s=ANSWER_TIMEOUT_S),
            tracing=tracing,
        )
        gateway = Gateway(served, {"m": await control_plane.gateway()}, "g1")
        exits.callback(gateway.close)
        url = await exits.enter_async_context(serving(gateway))
        http = await exits.enter_async_context(
            httpx.AsyncClient(
                base_url=url, timeout=ANSWER_TIMEOUT_S, limits=httpx.Limits(max_connections=None)
            )
        )
        yield ServingStack(replica, control_plane, http)


@dataclass(frozen=True)
class _Running:
    """An engine that is started and stopped elsewhere."""

    engine: Engine
    limits: EngineLimits

    async def start(self) -> EngineLimits:
        return self.limits

    @property
    def app(self) -> ASGIApp:
        return self.engine.app

    async def load(self) -> EngineLoad:
        return await self.engine.load()

    async def check_health(self) -> None:
        await self.engine.check_health()

    async def stop(self) -> None:
        pass


def _streamed(lines: list[str]) -> ClientView:
    events: list[dict[str, Any]] = [json.loads(line) for line in lines if line != "[DONE]"]
    tokens = sum(
        len(choice.get("token_ids") or ()) for event in events for choice in event.get("choices", ())
    )
    if any("error" in event for event in events):
        return ClientView("error event", tokens)
    return ClientView("answered" if lines[-1] == "[DONE]" else "cut", tokens)
