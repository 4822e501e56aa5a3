"""Fixtures for dashboard tests: a live scheduler behind a gateway, and its page in a browser."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.browser import BrowserPage, open_page, running_browser

from .harness import DashboardHarness, running_dashboard


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[DashboardHarness]:
    async with running_dashboard(tmp_path / "keys.json") as made:
        yield made


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run one browser for all tests; yield the address of its DevTools."""
    with running_browser(tmp_path_factory.mktemp("browser")) as address:
        yield address


@pytest.fixture
async def page(harness: DashboardHarness, browser: str) -> AsyncIterator[BrowserPage]:
    async with open_page(browser, f"{harness.url}/dashboard") as opened:
        await opened.emulate()
        await opened.becomes("document.querySelectorAll('[role=tab]').length > 0")
        yield opened
