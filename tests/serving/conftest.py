"""Fixtures for tests of the control channel and of the scheduler."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.serving.channel.harness import FAST, Simulation, scheduler_settings


@pytest_asyncio.fixture
async def world() -> AsyncIterator[Simulation]:
    """Yield one scheduler of a model with one pool, without peers."""
    world = Simulation(scheduler_settings(), FAST)
    await world.begin()
    yield world
    await world.close()
