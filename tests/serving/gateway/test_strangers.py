"""Servers that report nothing, as HTTP clients see them, with a real scheduler."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from serve_app.core.dispatch import in_flight
from serve_app.core.events import ReplicaJoined
from serve_app.core.routing.replica import ReplicaReport
from serve_app.engines.engine import Scope, Send
from tests.serving.channel.harness import wait_until

from .builders import Engine, chat, error_json, reply_json
from .fleet import Fleet, fleet_of, gathered

CHAT = "/v1/chat/completions"
SILENT = ReplicaReport(received=None, waiting=None, running=None, kv_usage_ratio=None)


class Hanging(Engine):
    """Engine that accepts requests and never answers."""

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        await asyncio.sleep(600)


class Limited(Engine):
    """Provider that answers so many requests at once, and rejects others with `Retry-After`."""

    most = 3

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        if self.running > self.most:
            headers = [(b"retry-after", b"30")]
            await reply_json(send, 429, error_json("rate limit reached", 429), headers)
            return
        await asyncio.sleep(0.05)
        await super()._answer(scope, body, send)


async def stream(fleet: Fleet, content: str = "hello") -> list[str]:
    """Send a streamed request, and return the data of its events."""
    body = chat(messages=[{"role": "user", "content": content}], stream=True)
    async with fleet.http.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200
        return [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]


async def tell_nothing(fleet: Fleet) -> None:
    """Let the replicas report and state nothing, like servers without metrics."""
    for replica in fleet.fake_replicas:
        replica.counts, replica.report = None, SILENT
        unknown = replace(replica.spec, kv_tokens=None, max_num_seqs=None)
        fleet.control_plane.live.feed(ReplicaJoined(unknown))
    await wait_until(lambda: all(state.report is not None for state in fleet.core.ledger))
    await wait_until(lambda: not any(state.reports_queue for state in fleet.core.ledger))


async def test_requests_that_hang_on_one_server_are_answered_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_flight, "_LEAST_WAIT_S", 0.4)
    hung, healthy = Hanging(), Engine()
    async with fleet_of([hung, healthy]) as fleet, asyncio.timeout(30):
        await tell_nothing(fleet)
        began = time.monotonic()
        answers = await gathered(*(stream(fleet) for _ in range(6)))
        assert time.monotonic() - began < 10
        assert hung.bodies
        assert {tuple(json.loads(each)["id"] for each in events[:-1]) for events in answers}
        assert all(events[-1] == "[DONE]" for events in answers)
        # Each is answered once, its first attempt is stopped, and the server is named.
        assert len(healthy.bodies) == 6
        await wait_until(lambda: hung.aborted == len(hung.bodies))
        assert fleet.core.ledger["s0"].hang_detector.hangs
        assert len(fleet.core) == 0


async def test_a_provider_that_rejects_what_is_too_much_completes_everything() -> None:
    provider = Limited()
    async with fleet_of([provider]) as fleet, asyncio.timeout(30):
        await tell_nothing(fleet)
        began = time.monotonic()
        answers = await gathered(*(stream(fleet) for _ in range(12)))
        # It asks for a pause of 30 s, which would cost everything that it does not reject.
        assert time.monotonic() - began < 15
        assert all(events[-1] == "[DONE]" for events in answers)
        assert fleet.core.ledger["s0"].max_num_seqs is not None
