"""Accessibility checks with axe-core, which `scripts/setup dev` installs here with npm."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser import BrowserPage

_AXE = Path(__file__).with_name("node_modules") / "axe-core" / "axe.min.js"

needs_axe = pytest.mark.skipif(
    not _AXE.exists(), reason="needs axe-core: scripts/setup dev installs it where npm is"
)


async def barriers(page: BrowserPage) -> list[str]:
    """Return axe-core's findings in the page's current state: each rule with the violating elements."""
    if not await page.evaluate("typeof window.axe === 'object'"):
        await page.evaluate(_AXE.read_text(encoding="utf-8") + "; true")
    found: list[dict[str, Any]] = await page.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then((result) => result.violations)"
    )
    return [
        f"{rule['id']}: {rule['help']}: {json.dumps([node['target'] for node in rule['nodes']])}"
        for rule in found
    ]
