"""Report in a browser: from a file, without a network."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serve_app.lab.reports.page import write_report
from tests.browser import BrowserPage, needs_browser, open_page
from tests.lab.reports.builders import report

pytestmark = needs_browser

FIGURE = "document.querySelector('figure.plot')"
READING = f"{FIGURE}.querySelector('.reading-at').textContent"
VALUES = f"[...{FIGURE}.querySelectorAll('output')].map((one) => one.textContent)"


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[BrowserPage]:
    path = tmp_path / "report.html"
    write_report(path, report())
    async with open_page(path.as_uri(), tmp_path) as opened:
        await opened.becomes("document.documentElement.dataset.plots === '1'")
        yield opened


async def settled(page: BrowserPage) -> None:
    """Wait until the page has been drawn."""
    await page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 80)))")


async def inks(page: BrowserPage, selector: str = "canvas") -> int:
    """Return the number of drawn pixels of a plot."""
    found = await page.evaluate(
        f"""(() => {{
          const canvas = document.querySelector('{selector}');
          const {{ data }} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          return data.filter((value, place) => place % 4 === 3 && value > 0).length;
        }})()"""
    )
    return int(found)


async def box(page: BrowserPage) -> list[float]:
    """Scroll the plot area into view; return its left, top, width and height."""
    found: list[float] = await page.evaluate(
        """(() => {
          const area = document.querySelector('.u-over');
          area.scrollIntoView({ block: 'center' });
          const { left, top, width, height } = area.getBoundingClientRect();
          return [left, top, width, height];
        })()"""
    )
    return found


async def colours(page: BrowserPage) -> set[str]:
    """Return the dominant colours of a plot."""
    found = await page.evaluate(
        """(() => {
          const canvas = document.querySelector('canvas');
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          const seen = new Map();
          for (let at = 0; at < data.length; at += 4) {
            if (data[at + 3] !== 255) continue;
            const name = data.slice(at, at + 3).join(' ');
            seen.set(name, (seen.get(name) ?? 0) + 1);
          }
          return [...seen].filter(([, count]) => count > 40).map(([name]) => name);
        })()"""
    )
    return set(found)


async def test_it_draws_its_plots_and_requests_nothing_else(page: BrowserPage) -> None:
    assert await inks(page) > 2_000
    assert [url for url in page.requests if not url.startswith("data:")] == page.requests[:1]
    assert page.requests[0].startswith("file://")
    assert page.problems == []


async def test_the_browser_runs_no_script_that_is_not_its_own(page: BrowserPage) -> None:
    await page.evaluate(
        """(() => {
          const added = document.createElement('script');
          added.textContent = 'window.intruded = true';
          document.body.append(added);
        })()"""
    )
    assert await page.evaluate("window.intruded") is None
    assert any("Content Security Policy" in problem for problem in page.problems)


async def test_names_with_markup_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, report("</script><script>owned = 1</script><img src=x onerror='owned = 2'>"))
    async with open_page(path.as_uri(), tmp_path) as opened:
        await opened.becomes("document.documentElement.dataset.plots === '1'")
        assert await opened.evaluate("window.owned") is None
        assert await opened.evaluate("document.images.length") == 0
        assert await inks(opened) > 2_000
        assert opened.problems == []


async def test_the_values_under_the_mouse_are_shown(page: BrowserPage) -> None:
    left, top, width, height = await box(page)
    # The axis is logarithmic, with 10 ms, 100 ms, 1 s and 10 s: a third of the width is 100 ms.
    await page.mouse(("mouseMoved", left + width / 3, top + height / 2))
    await page.becomes(f"{READING} === 'at TTFT 100 ms:'")
    assert await page.evaluate(VALUES) == ["20 %", "50 %"]


async def test_a_drag_with_the_mouse_zooms_in(page: BrowserPage) -> None:
    left, top, width, height = await box(page)
    whole = await inks(page)
    middle = top + height / 2
    await page.mouse(("mouseMoved", left + 0.4 * width, middle), ("mousePressed", left + 0.4 * width, middle))
    await page.mouse(
        ("mouseMoved", left + 0.9 * width, middle), ("mouseReleased", left + 0.9 * width, middle)
    )
    await settled(page)
    assert await inks(page) != whole
    # 10 ms at the left edge is out of range now: 100 ms and 1 s are at 1/3 and 2/3 of the width.
    await page.mouse(("mouseMoved", left + 0.02 * width, middle))
    await page.becomes(f"{READING} === 'at TTFT 100 ms:' || {READING} === 'at TTFT 1 s:'")
    await page.evaluate(f"{FIGURE}.querySelector('.whole').click()")
    await settled(page)
    assert await inks(page) == whole


async def test_the_keyboard_moves_zooms_and_goes_back(page: BrowserPage) -> None:
    await page.evaluate("document.querySelector('.drawing').focus()")
    await page.press("Home")
    await page.becomes(f"{READING} === 'at TTFT 10 ms:'")
    await page.press("ArrowRight")
    await page.press("ArrowRight")
    await page.becomes(f"{READING} === 'at TTFT 1 s:'")
    assert await page.evaluate(VALUES) == ["60 %", "-"]
    whole = await inks(page)
    await page.press("+")
    await page.press("+")
    assert await inks(page) != whole
    await page.press("Escape")
    await settled(page)
    assert await inks(page) == whole


async def test_a_series_is_switched_off_and_on(page: BrowserPage) -> None:
    switch = "document.querySelector('[data-series=\"1\"]')"
    whole = await inks(page)
    await page.evaluate(f"{switch}.click()")
    await settled(page)
    assert await inks(page) < whole
    await page.evaluate(f"{switch}.focus()")
    await page.press(" ")
    await settled(page)
    assert await inks(page) == whole


async def test_an_axis_is_linear_or_logarithmic(page: BrowserPage) -> None:
    axis = "document.querySelector('[data-axis=x]')"
    assert await page.evaluate(f"{axis}.checked")
    before = await inks(page)
    await page.evaluate(f"{axis}.click()")
    await settled(page)
    assert await inks(page) != before
    assert page.problems == []


@pytest.mark.parametrize("selectors", [("[data-series]", "[data-axis]"), ("[data-axis]", "[data-series]")])
async def test_axes_change_while_nothing_is_shown(page: BrowserPage, selectors: tuple[str, str]) -> None:
    whole = await inks(page)
    for selector in (*selectors, *selectors):
        await page.evaluate(f"document.querySelectorAll('{selector}').forEach((one) => one.click())")
        await settled(page)
    assert await inks(page) == whole
    assert page.problems == []


async def test_colours_follow_the_scheme_and_paper_is_light(page: BrowserPage) -> None:
    found = {}
    for scheme, medium in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        await page.emulate(scheme=scheme, medium=medium)
        await settled(page)
        background = await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        found[scheme, medium] = (background, await colours(page))
    assert found["light", "screen"][0] == found["dark", "print"][0] == "rgb(255, 255, 255)"
    assert found["dark", "screen"][0] != "rgb(255, 255, 255)"
    # The candidate's line has the second colour of each scheme.
    assert "199 80 0" in found["light", "screen"][1]
    assert "199 80 0" in found["dark", "print"][1]
    assert "255 155 82" in found["dark", "screen"][1]


@pytest.mark.parametrize("width", [360, 800, 1_600])
async def test_the_page_never_scrolls_sideways(tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    write_report(path, report(f"http://{'inference' * 9}.example:8000"))
    async with open_page(path.as_uri(), tmp_path) as page:
        await page.becomes("document.documentElement.dataset.plots === '1'")
        await page.emulate(width=width)
        await settled(page)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate("document.querySelector('canvas').getBoundingClientRect().width") <= width


async def test_without_scripts_the_values_are_there_and_no_dead_switch_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, report())
    async with open_page(path.as_uri(), tmp_path, scripts=False) as opened:
        # The page's scripts do not run; the browser's tools can still read it.
        text = await opened.evaluate("document.body.innerText")
        assert "The plot needs JavaScript" in text
        assert "ours is better" in text
        assert "Full range" not in text
        assert await opened.evaluate("document.querySelectorAll('figure table td').length") == 8
