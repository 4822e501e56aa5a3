from collections.abc import AsyncIterator

import pytest_asyncio

from tests.serving.channel.harness import FAST, World, scheduler_settings


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    """One scheduler of a model with one pool, and no peers yet."""
    world = World(scheduler_settings(), FAST)
    await world.begin()
    yield world
    await world.close()
