import asyncio
import threading

import pytest

from serve_app.serving.cached_page import CachedPage


class Source:
    """Page source that counts its calls and can block."""

    def __init__(self) -> None:
        self.gathered = 0
        self.threads: list[int] = []
        self.work = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.fault: Exception | None = None

    async def gather(self) -> int:
        self.gathered += 1
        await self.go_on.wait()
        if self.fault is not None:
            raise self.fault
        return self.gathered

    def render(self, content: int) -> str:
        self.threads.append(threading.get_ident())
        sum(range(self.work))
        return f"page {content}"


async def test_simultaneous_readers_get_one_page_that_is_not_rendered_on_the_loop() -> None:
    source = Source()
    page = CachedPage(source.gather, source.render)
    assert await asyncio.gather(*(page.text() for _ in range(100))) == ["page 1"] * 100
    assert len(source.threads) == 1
    assert threading.get_ident() not in source.threads


async def test_a_slow_page_is_cached_for_long_and_then_rendered_again() -> None:
    source = Source()
    source.work = 1_000_000
    page = CachedPage(source.gather, source.render)
    assert await page.text() == "page 1"
    # The page took milliseconds to build, so it is cached for hundreds.
    assert await page.text() == "page 1"
    async with asyncio.timeout(30):
        while await page.text() == "page 1":  # noqa: ASYNC110 - its age is all that changes
            await asyncio.sleep(0.01)
    assert await page.text() == "page 2"


async def test_a_cancelled_reader_does_not_cancel_the_page_for_others() -> None:
    source = Source()
    source.go_on.clear()
    page = CachedPage(source.gather, source.render)
    impatient, patient = (asyncio.ensure_future(page.text()) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    source.go_on.set()
    assert await patient == "page 1"


async def test_a_fault_reaches_its_own_readers_and_no_later_ones() -> None:
    source = Source()
    page = CachedPage(source.gather, source.render)
    source.fault = RuntimeError("no figures")
    with pytest.raises(RuntimeError, match="no figures"):
        await page.text()
    source.fault = None
    assert await page.text() == "page 2"
