"""Operator steps in the dashboard, with their expected results."""

import json

from tests.browser import BrowserPage
from tests.serving.gateway.builders import MODEL

from .harness import KEY

TABS = ("overview", "queues", "fleet", "tenants", "batches", "keys", "tuner", "request", "playground")


async def sign_in(page: BrowserPage, key: str = KEY) -> None:
    await page.evaluate(f"document.getElementById('key').value = {json.dumps(key)}")
    await page.evaluate("document.querySelector('#door button').click()")


async def live(page: BrowserPage, key: str = KEY) -> None:
    await sign_in(page, key)
    await page.becomes("document.getElementById('state').textContent === 'live'")
    await page.becomes("document.querySelectorAll('.tile').length === 6")


async def choose(page: BrowserPage, tab: str) -> None:
    await page.evaluate(f"document.getElementById('tab-{tab}').click()")
    await page.becomes(f"!document.getElementById('panel-{tab}').hidden")


def tile(name: str) -> str:
    return (
        f"[...document.querySelectorAll('.tile')].find((each) => each.textContent.startsWith({name!r}))"
        ".querySelector('.figure').textContent"
    )


def plain(shown: str) -> str:
    """Replace special spaces by ordinary ones."""
    return shown.replace("\u00a0", " ")


async def open_playground(page: BrowserPage) -> None:
    await live(page)
    await choose(page, "playground")
    await page.becomes(f"document.querySelector('[name=model]').value === {MODEL!r}")


async def shows(page: BrowserPage, tab: str, words: str) -> str:
    """Wait until a view contains these words; return its text."""
    found = f"document.getElementById('panel-{tab}').innerText"
    return plain(await page.becomes(f"{found}.includes({words!r}) && {found}"))


async def text(page: BrowserPage, selector: str) -> str:
    found: str = await page.evaluate(f"document.querySelector({selector!r}).innerText")
    return plain(found)
