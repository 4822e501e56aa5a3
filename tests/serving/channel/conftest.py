import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio

from tests.serving.channel.harness import FAST, Simulation, scheduler_settings


@pytest_asyncio.fixture
async def world() -> AsyncIterator[Simulation]:
    """Yield one scheduler of a model with one pool, without peers."""
    world = Simulation(scheduler_settings(), FAST)
    await world.begin()
    yield world
    await world.close()


def pytest_asyncio_loop_factories(
    item: pytest.Function,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run a module's tests on each event loop in its `LOOP_FACTORIES`."""
    found: Mapping[str, Callable[[], asyncio.AbstractEventLoop]]
    found = getattr(item.module, "LOOP_FACTORIES", {"asyncio": asyncio.new_event_loop})
    return found
