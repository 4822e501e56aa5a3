from collections.abc import AsyncIterator

import pytest_asyncio

from tests.serving.channel.harness import FAST, Simulation, scheduler_settings


@pytest_asyncio.fixture
async def world() -> AsyncIterator[Simulation]:
    """One scheduler of a model with one pool, and no peers yet."""
    world = Simulation(scheduler_settings(), FAST)
    await world.begin()
    yield world
    await world.close()
