"""Fixtures for dashboard tests: a live scheduler behind a gateway, and its page in a browser."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.browser import BrowserPage, open_page

from .stage import PageStage, page_stage


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[PageStage]:
    async with page_stage(tmp_path / "keys.json") as made:
        yield made


@pytest.fixture
async def page(stage: PageStage, tmp_path: Path) -> AsyncIterator[BrowserPage]:
    async with open_page(f"{stage.url}/dashboard", tmp_path) as opened:
        await opened.emulate()
        await opened.becomes("document.querySelectorAll('[role=tab]').length > 0")
        yield opened
