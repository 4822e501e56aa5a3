"""Properties of every dashboard view: accessibility, widths, motion, no foreign scripts."""

import httpx
import pytest

from tests.accessibility import barriers, needs_axe
from tests.browser import BrowserPage, needs_browser
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.builders import MODEL

from .harness import KEY, DashboardHarness
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
async def test_no_view_has_a_barrier(harness: DashboardHarness, page: BrowserPage, scheme: str) -> None:
    await page.emulate(scheme=scheme)
    assert await barriers(page) == []
    await live(page)
    await harness.pause_dispatch()
    for number in range(5):
        harness.submit(f"r{number}", tenant=f"t{number % 3}")
    await page.becomes(f"{tile('Waiting')} === '5'")
    for tab in TABS:
        await choose(page, tab)
        assert await barriers(page) == [], tab
    await page.evaluate("location.hash = '#request/r1'")
    await shows(page, "request", "r1: waiting")
    assert await barriers(page) == []
    harness.resume_dispatch()
    await wait_until(lambda: not harness.fleet.core.find("r1").queued)
    harness.end("r1")
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


async def test_nothing_is_wider_than_the_window(harness: DashboardHarness, page: BrowserPage) -> None:
    await live(page)
    await harness.pause_dispatch()
    harness.submit("r1", tenant="a-tenant-with-quite-a-long-name" * 4)
    await page.becomes(f"{tile('Waiting')} === '1'")
    for tab in TABS:
        await choose(page, tab)
        await harness.next_frames()
        for width in (400, 1280):
            await page.emulate(width=width)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, tab


async def chart_of(harness: DashboardHarness, page: BrowserPage) -> None:
    """Sign in, and show the charts of one streamed answer."""
    await live(page)
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "stream": True}
    admin = {"authorization": f"Bearer {KEY}"}
    headers = {**admin, "x-priority": "interactive", "x-tenant": "a-tenant-with-a-long-name"}
    async with httpx.AsyncClient(base_url=harness.url, timeout=20, headers=headers) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    await page.becomes("document.querySelectorAll('#panel-overview svg[role=img]').length === 2")


async def test_no_label_of_a_chart_covers_another(harness: DashboardHarness, page: BrowserPage) -> None:
    await chart_of(harness, page)
    # The least space between two labels on one line, in pixels.
    space = """Math.min(...[...document.querySelectorAll('svg')].flatMap((chart) => {
        const boxes = [...chart.querySelectorAll('.grid text')].map((each) => each.getBoundingClientRect());
        return boxes.flatMap((one) => boxes.filter((other) => one.left < other.left && one.y === other.y)
          .map((other) => other.left - one.right));
      }))"""
    for width in (390, 700, 960, 1400, 1900):
        await page.emulate(width=width)
        await harness.next_frames()
        assert await page.evaluate(space) >= 8, width


async def test_the_legend_of_lines_has_their_dashes(harness: DashboardHarness, page: BrowserPage) -> None:
    await chart_of(harness, page)
    dashes = (
        "[...document.querySelectorAll('#ttft-card .legend svg line')]"
        ".map((each) => getComputedStyle(each).strokeDasharray)"
    )
    assert await page.evaluate(dashes) == ["none", "7px, 3px", "2px, 3px"]
    await choose(page, "queues")
    of_border = (
        "[...document.querySelectorAll('#axis-card line.border')].map((each) => getComputedStyle(each))"
    )
    found = await page.evaluate(f"{of_border}.map((each) => each.strokeDasharray + each.stroke)")
    assert len(found) == 2
    assert len(set(found)) == 1


async def test_no_text_of_the_tiles_is_cut(harness: DashboardHarness, page: BrowserPage) -> None:
    await chart_of(harness, page)
    cut = (
        "[...document.querySelectorAll('.tile > *')].filter((each) => each.scrollHeight > each.clientHeight"
        " || each.scrollWidth > each.clientWidth).map((each) => each.innerText)"
    )
    for width in (360, 390, 700, 1400):
        await page.emulate(width=width)
        assert await page.evaluate(cut) == [], width


async def test_empty_queues_do_not_look_like_a_backlog(harness: DashboardHarness, page: BrowserPage) -> None:
    await live(page)
    await choose(page, "queues")
    await shows(page, "queues", "No request is queued; the limit is")
    shapes = "[...document.querySelectorAll('.axis rect')].filter((each) => each.getBBox().height > 0)"
    fills = await page.evaluate(f"{shapes}.map((each) => getComputedStyle(each).fill)")
    assert set(fills) == {"none"}


async def test_tables_fit_into_a_wide_window(harness: DashboardHarness, page: BrowserPage) -> None:
    await chart_of(harness, page)
    await page.emulate(width=1400)
    cut = (
        "[...document.querySelectorAll('[role=tabpanel]:not([hidden]) .scroll')]"
        ".filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.ariaLabel)"
    )
    for tab in TABS:
        await choose(page, tab)
        await harness.next_frames()
        assert await page.evaluate(cut) == [], tab


async def test_the_state_of_the_tuner_is_apart_from_its_mode(page: BrowserPage) -> None:
    await live(page)
    await choose(page, "tuner")
    await shows(page, "tuner", "Mode")
    facts = "[...document.querySelectorAll('#panel-tuner .facts > div')].map((each) => each.innerText)"
    mode, state, *_ = await page.evaluate(facts)
    assert mode.startswith("Mode")
    assert ":" not in mode
    assert state.startswith("State")


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
