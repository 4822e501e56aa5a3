import asyncio
from typing import Any, NoReturn

from serve_app.serving.channel.connector import Connector
from serve_app.serving.channel.messages import Role
from tests.serving.channel.harness import FAST, Simulation


class Silent:
    """A resident that nobody lets in."""

    def on_connected(self, *_: Any) -> NoReturn:
        raise AssertionError("nobody is there")

    on_message = on_disconnected = on_connected

    def on_heartbeat(self) -> None:
        pass


async def test_a_search_whose_answer_comes_as_it_is_closed_ends() -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def locate() -> NoReturn:
        asked.set()
        await answered.wait()
        raise ConnectionError("nobody is there")

    connector = Connector(Role.GATEWAY, "g1", locate, FAST, Silent())
    connector.start()
    await asked.wait()
    answered.set()
    async with asyncio.timeout(5):
        await connector.close()
    assert not connector.is_up


async def test_a_replica_that_is_closed_as_it_has_news_ends(world: Simulation) -> None:
    client, double = await world.replica("s1")
    looks = double.looks
    while double.looks == looks:  # noqa: ASYNC110 - so that it waits for news, and has just begun to
        await asyncio.sleep(0)
    client.report_now()
    async with asyncio.timeout(5):
        await client.close()
    assert not client.is_connected
