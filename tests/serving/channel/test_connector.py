import asyncio
from dataclasses import replace
from typing import Any, NoReturn

from serve_app.serving.channel.connector import Connector
from serve_app.serving.channel.messages import Role, SchedulerEndpoint
from tests.serving.channel.harness import FAST, AwaitedClient, ControlPlane, wait_until


class Silent:
    """Peer whose connection must never succeed."""

    def on_connected(self, *_: Any) -> NoReturn:
        raise AssertionError("no scheduler is listening")

    on_message = on_disconnected = on_connected

    def on_heartbeat(self) -> None:
        pass


async def test_a_search_whose_answer_arrives_as_it_is_closed_ends() -> None:
    received, answered = asyncio.Event(), asyncio.Event()

    async def locate() -> NoReturn:
        received.set()
        await answered.wait()
        raise ConnectionError("no scheduler is listening")

    connector = Connector(Role.GATEWAY, "g1", locate, FAST, Silent())
    connector.start()
    await received.wait()
    answered.set()
    async with asyncio.timeout(5):
        await connector.close()
    assert not connector.is_up


async def test_a_replica_that_is_closed_as_it_has_news_ends(control_plane: ControlPlane) -> None:
    client, double = await control_plane.replica("s1")
    looks = double.looks
    while double.looks == looks:  # noqa: ASYNC110 - so that it waits for news, and has just begun to
        await asyncio.sleep(0)
    client.report_now()
    async with asyncio.timeout(5):
        await client.close()
    assert not client.is_connected


async def test_a_search_that_always_takes_longer_than_its_limit_succeeds(control_plane: ControlPlane) -> None:
    """Regression test: on a starved machine every search timed out, and gateways stayed disconnected."""

    async def locate() -> SchedulerEndpoint:
        await asyncio.sleep(0.3)
        return control_plane.endpoint()

    client = AwaitedClient("g1", locate, replace(FAST, locate_timeout_s=0.1, handshake_timeout_s=10.0))
    client.start()
    await wait_until(lambda: client.is_connected, "the search is given more time")
    await client.close()
