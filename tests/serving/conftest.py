"""Fixtures for tests of the control channel and of the scheduler."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.serving.channel.harness import FAST, ControlPlane, scheduler_settings


@pytest_asyncio.fixture
async def control_plane() -> AsyncIterator[ControlPlane]:
    """Yield one scheduler of a model with one pool, without peers."""
    control_plane = ControlPlane(scheduler_settings(), FAST)
    await control_plane.begin()
    yield control_plane
    await control_plane.close()
