from collections.abc import AsyncIterator

import pytest

from serve_app.engines.emulated.engine import EmulatedEngineSettings
from tests.engines.servers import Served, served


@pytest.fixture
def settings() -> EmulatedEngineSettings:
    return EmulatedEngineSettings(served_model_names=("tiny", "alias"), profile="laptop", speed_up=4.0)


@pytest.fixture
async def engine(settings: EmulatedEngineSettings) -> AsyncIterator[Served]:
    async with served(settings) as it:
        yield it
