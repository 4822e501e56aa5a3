"""Admin queries from a gateway to its scheduler."""

import asyncio
from typing import Any

import msgspec
import pytest

from serve_app.errors import ChannelError, Outcome
from serve_app.request import Usage
from tests.serving.channel.harness import PATIENCE_S, ControlPlane, granted, wait_until


class Slow:
    """Query handler that returns its argument once it is released."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.received = asyncio.Event()
        self.release = asyncio.Event()

    async def answer(self, query: str, arguments: bytes) -> bytes:
        self.received.set()
        await self.release.wait()
        return msgspec.json.encode(self.found)


async def test_a_gateway_queries_its_scheduler_about_a_request(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    await control_plane.replica("s1")
    await granted(gateway, "r1")
    under_way = await gateway.query("receipt", request_id="r1")
    assert (under_way["request_id"], under_way["state"]) == ("r1", "running")
    gateway.end("r1", Outcome.COMPLETED, Usage(prompt_tokens=10, output_tokens=5))
    await wait_until(lambda: len(control_plane.live.core) == 0)
    assert (await gateway.query("receipt", request_id="r1"))["outcome"] == "completed"
    assert await gateway.query("receipt", request_id="unknown") == {}
    assert [line["output_length"] for line in await gateway.query("capture")] == [5]
    for query in ("status", "queue", "overview", "costs", "usage", "mode"):
        assert (await gateway.query(query))["model"] == "m"


async def test_an_answer_longer_than_a_frame_arrives_complete(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    control_plane.live.queries = slow = Slow("x" * (3 * control_plane.channel.max_frame_bytes))
    slow.release.set()
    assert await asyncio.wait_for(gateway.query("any"), PATIENCE_S) == slow.found


async def test_a_failed_query_returns_the_reason_and_leaves_the_connection(
    control_plane: ControlPlane,
) -> None:
    gateway = await control_plane.gateway()
    with pytest.raises(ChannelError, match="unknown query 'nonsense'"):
        await gateway.query("nonsense")
    with pytest.raises(ChannelError, match="active_share must be from 0 to 1"):
        await gateway.query("change_mode", active_share=7)
    assert (await gateway.query("mode"))["active_share"] == 1
    assert gateway.is_connected


async def test_an_empty_answer_is_an_error(control_plane: ControlPlane) -> None:
    class Empty:
        async def answer(self, query: str, arguments: bytes) -> bytes:
            return b""

    gateway = await control_plane.gateway()
    control_plane.live.queries = Empty()
    with pytest.raises(ChannelError, match="the answer to query 'status' is empty"):
        await asyncio.wait_for(gateway.query("status"), PATIENCE_S)


async def test_a_query_to_a_lost_scheduler_fails_immediately(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    control_plane.live.queries = slow = Slow({})
    pending = asyncio.create_task(gateway.query("status"))
    await slow.received.wait()
    control_plane.kill()
    with pytest.raises(ChannelError, match="was lost before it responded"):
        await asyncio.wait_for(pending, PATIENCE_S)
    with pytest.raises(ChannelError, match="no scheduler is connected"):
        await gateway.query("status")


async def test_a_query_that_timed_out_is_removed(control_plane: ControlPlane) -> None:
    gateway = await control_plane.gateway()
    control_plane.live.queries = slow = Slow({})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gateway.query("status"), 0.05)
    slow.release.set()
    control_plane.live.queries = other = Slow({"model": "m"})
    other.release.set()
    assert await asyncio.wait_for(gateway.query("status"), PATIENCE_S) == {"model": "m"}
