"""Fixtures for dashboard tests: a live scheduler behind a gateway, and its page in a browser."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.browser import BrowserPage, open_page, running_browser

from .stage import PageStage, page_stage


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[PageStage]:
    async with page_stage(tmp_path / "keys.json") as made:
        yield made


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run one browser for all tests; yield the address of its DevTools."""
    with running_browser(tmp_path_factory.mktemp("browser")) as address:
        yield address


@pytest.fixture
async def page(stage: PageStage, browser: str) -> AsyncIterator[BrowserPage]:
    async with open_page(browser, f"{stage.url}/dashboard") as opened:
        await opened.emulate()
        await opened.becomes("document.querySelectorAll('[role=tab]').length > 0")
        yield opened
