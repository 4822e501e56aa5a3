"""Headless Chromium for page tests, driven through its DevTools protocol.

    with running_browser(folder) as address:
        async with open_page(address, url) as page:
            assert await page.evaluate("document.title") == "..."

Tests that use it are marked `needs_browser`. They may share a browser: each page is a new tab.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FOUND = next((path for name in _PROGRAMS if (path := shutil.which(name))), None)
_WAIT_S = 60.0
# Containers have no sandbox, little /dev/shm and no graphics card.
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--remote-debugging-port=0"),
)
_KEYS = {"Tab": 9, "End": 35, "ArrowLeft": 37, "ArrowRight": 39}

needs_browser = pytest.mark.skipif(
    _FOUND is None, reason=f"needs a browser, one of {', '.join(_PROGRAMS)}: apt-get install chromium"
)


class BrowserPage:
    """One open page.

    Attributes:
        requests: requested addresses, the page's own first.
        problems: script errors, and violations of the page's policy.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._target: dict[str, Any] = {}
        self._loaded = asyncio.Event()

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; await promises."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def becomes(self, expression: str) -> Any:
        """Return the value of an expression once it is true."""
        async with asyncio.timeout(_WAIT_S):
            while not (value := await self.evaluate(expression)):  # noqa: ASYNC110 - pages emit no events
                await asyncio.sleep(0.05)
        return value

    async def press(self, key: str) -> None:
        """Press a key on the focused element."""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=_KEYS[key])

    async def emulate(self, *, scheme: str = "light", width: int = 1_280) -> None:
        """Show the page in a colour scheme, with this width in pixels."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one protocol command."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        async with asyncio.timeout(_WAIT_S):
            found: dict[str, Any] = await answer
        return found

    async def listen(self) -> None:
        """Read the browser's messages until it ends."""
        async for message in self._socket:
            found = message.json()
            if "id" in found:
                self._settle(found)
            else:
                self._note(found["method"], found.get("params", {}))

    async def open(self, url: str) -> None:
        """Open a page and wait until it has loaded."""
        self._target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", **self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(_WAIT_S):
            await self._loaded.wait()

    async def close(self) -> None:
        """Close the page."""
        self._session = None
        await self.call("Target.closeTarget", **self._target)

    def _settle(self, found: dict[str, Any]) -> None:
        answer = self._answers.pop(found["id"])
        if answer.done():
            return
        if "error" in found:
            answer.set_exception(AssertionError(found["error"]))
        else:
            answer.set_result(found["result"])

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])


@contextlib.contextmanager
def running_browser(folder: Path) -> Iterator[str]:
    """Run a browser; yield the address of its DevTools.

    Args:
        folder: for the browser's files.
    """
    assert _FOUND is not None
    with (folder / "log").open("wb") as log:
        program = subprocess.Popen(
            [_FOUND, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield _address(program, folder)
    finally:
        # A separate process group: the launcher and all of its children.
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def _address(program: "subprocess.Popen[bytes]", folder: Path) -> str:
    deadline = time.monotonic() + _WAIT_S
    written = folder / "DevToolsActivePort"
    while not (written.exists() and (lines := written.read_text().splitlines())[1:]):
        assert program.poll() is None, (folder / "log").read_text(errors="replace")[-2_000:]
        assert time.monotonic() < deadline, "the browser does not start"
        time.sleep(0.02)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


@contextlib.asynccontextmanager
async def open_page(browser: str, url: str) -> AsyncIterator[BrowserPage]:
    """Open a page in the browser whose DevTools have this address."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(browser, max_msg_size=0) as socket,
    ):
        page = BrowserPage(socket)
        listening = asyncio.create_task(page.listen())
        try:
            await page.open(url)
            yield page
        finally:
            await page.close()
            listening.cancel()
