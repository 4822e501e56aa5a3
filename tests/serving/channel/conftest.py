import asyncio
from collections.abc import Callable, Mapping

import pytest


def pytest_asyncio_loop_factories(
    item: pytest.Function,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run a module's tests on each event loop in its `LOOP_FACTORIES`."""
    found: Mapping[str, Callable[[], asyncio.AbstractEventLoop]]
    found = getattr(item.module, "LOOP_FACTORIES", {"asyncio": asyncio.new_event_loop})
    return found
