"""Properties of every dashboard view: accessibility, widths, motion, no foreign scripts."""

import pytest

from tests.accessibility import barriers, needs_axe
from tests.browser import BrowserPage, needs_browser
from tests.serving.channel.harness import until

from .stage import PageStage
from .steps import TABS, choose, live, shows, tile

pytestmark = needs_browser


async def test_nothing_of_it_runs_beside_its_own_scripts(page: BrowserPage) -> None:
    rejected = await page.evaluate(
        """(() => {
          const added = document.createElement('script');
          try {
            added.textContent = 'window.intruded = true';
            document.body.append(added);
          } catch {
            return 'thrown';
          }
          return String(window.intruded);
        })()"""
    )
    assert rejected in {"thrown", "undefined"}
    outcome = (
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'set'; } catch { return 'thrown'; } })()"
    )
    assert await page.evaluate(outcome) == "thrown"


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_view_has_a_barrier(stage: PageStage, page: BrowserPage, scheme: str) -> None:
    await page.emulate(scheme=scheme)
    assert await barriers(page) == []
    await live(page)
    await stage.hold()
    for number in range(5):
        stage.submit(f"r{number}", tenant=f"t{number % 3}")
    await page.becomes(f"{tile('Waiting')} === '5'")
    for tab in TABS:
        await choose(page, tab)
        assert await barriers(page) == [], tab
    await page.evaluate("location.hash = '#request/r1'")
    await shows(page, "request", "r1: waiting")
    assert await barriers(page) == []
    stage.release()
    await until(lambda: not stage.fleet.core.find("r1").queued)
    stage.end("r1")
    await page.evaluate("document.querySelector('#panel-request form').requestSubmit()")
    await shows(page, "request", "r1: completed")
    await shows(page, "request", "Requests dispatched to pool")
    assert await barriers(page) == []
    # The width changes no colour.
    if scheme == "light":
        await page.emulate(scheme=scheme, width=400)
        for tab in TABS:
            await choose(page, tab)
            assert await barriers(page) == [], tab


async def test_nothing_is_wider_than_the_window(stage: PageStage, page: BrowserPage) -> None:
    await live(page)
    await stage.hold()
    stage.submit("r1", tenant="a-tenant-with-quite-a-long-name" * 4)
    await page.becomes(f"{tile('Waiting')} === '1'")
    for tab in TABS:
        await choose(page, tab)
        await stage.next_frames()
        for width in (400, 1280):
            await page.emulate(width=width)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, tab


async def test_nothing_moves_with_reduced_motion(page: BrowserPage) -> None:
    moving = "getComputedStyle(document.querySelector('#panel-fleet .bar > span')).transitionDuration"
    await live(page)
    await choose(page, "fleet")
    await page.becomes("document.querySelector('#panel-fleet .bar') !== null")
    assert await page.evaluate(moving) == "0.3s"
    await page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}]
    )
    assert await page.evaluate(moving) == "0s"
