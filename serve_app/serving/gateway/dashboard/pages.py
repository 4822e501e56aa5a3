"""The dashboard: static files, which are public and hold no data, and events, which need an admin key.

GET   /dashboard          the page
GET   /dashboard/FILE     its style and modules
GET   /dashboard/events   frames as server-sent events

The page prompts for the key and sends it in the `Authorization` header. Cookies are avoided, because a
browser would also attach them to requests made by other sites.
"""

import asyncio
import contextvars
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import SchedulerQueries
from serve_app.serving.gateway.admin import admin_route, query_all
from serve_app.serving.gateway.answer.responses import ClientGone, RequestRejected, data_event, encode
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.path import Request
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.router import HttpRoute
from serve_app.serving.gateway.upstream import HeaderList

logger = logging.getLogger("ray.serve")

INTERVAL_S = 1.0
# A scheduler that is being replaced must not delay the data of the others.
_RESPONSE_TIMEOUT_S = 2.0


class Frames:
    """Renderer of frames, shared by all watchers; a context manager around each watcher.

    Args:
        queries: admin queries of each model's scheduler, by model.
        gateway_id: included in each frame, because each gateway has its own watchers.
        batches: returns the batches of all tenants.
        interval_s: time between two frames, in seconds.

    Attributes:
        watchers: number of browsers that watch.
        rendered: number of rendered frames.
    """

    def __init__(
        self,
        queries: Mapping[str, SchedulerQueries],
        gateway_id: str,
        batches: Callable[[], Awaitable[Mapping[str, Any]]],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._queries = queries
        self._gateway_id = gateway_id
        self._batches = batches
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._latest = b""
        self._is_new = asyncio.Event()
        self._closed = False
        self.watchers = 0
        self.rendered = 0

    def __repr__(self) -> str:
        return f"<Frames watchers={self.watchers} rendered={self.rendered}>"

    def __enter__(self) -> Self:
        self.watchers += 1
        if self._task is None and not self._closed:
            # In an empty context, because Ray Serve cancels a request's tasks with the request.
            self._task = asyncio.get_running_loop().create_task(self._render(), context=contextvars.Context())
        return self

    def __exit__(self, *_: object) -> None:
        self.watchers -= 1
        if not self.watchers:
            self._stop()

    async def next(self) -> bytes | None:
        """Wait for the next frame, and return it as JSON; None after `close`."""
        if not self._closed:
            await self._is_new.wait()
        return None if self._closed else self._latest

    def close(self) -> None:
        """Stop rendering, and wake all watchers."""
        self._closed = True
        self._stop()
        self._is_new.set()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _render(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                self._latest = await self._frame()
            except Exception:
                # Watchers receive no frame, and the log has the reason.
                logger.exception("event=dashboard_error")
            else:
                self.rendered += 1
                is_new, self._is_new = self._is_new, asyncio.Event()
                is_new.set()
            await asyncio.sleep(max(0.0, began + self._interval_s - loop.time()))

    async def _frame(self) -> bytes:
        models = await query_all(
            self._queries, lambda _, scheduler: scheduler.query("overview"), _RESPONSE_TIMEOUT_S
        )
        return encode(
            {
                "at": time.time(),
                "interval_s": self._interval_s,
                "gateway": {"id": self._gateway_id, "watchers": self.watchers},
                "models": models,
                "batches": await self._batches(),
            }
        )


DASHBOARD_PATH = "/dashboard"
EVENTS_PATH = f"{DASHBOARD_PATH}/events"
# Watchers of one gateway share each frame, so a further one costs only its transmission.
MAX_WATCHERS = 20

STATIC_FOLDER = Path(__file__).with_name("static")
_INDEX = "index.html"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# No foreign or inline code, and no markup from text, because tenants choose their names.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: HeaderList = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Another version may serve other files under the same names.
    (b"cache-control", b"no-cache"),
]
_STREAM_HEADERS: HeaderList = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Without this, reverse proxies buffer streams.
    (b"x-accel-buffering", b"no"),
]


class Dashboard:
    """The page, its files, and its events for at most `max_watchers` browsers."""

    def __init__(self, frames: Frames, reader: RequestReader, max_watchers: int = MAX_WATCHERS) -> None:
        self._frames = frames
        self._reader = reader
        self._max_watchers = max_watchers

    def routes(self) -> Iterator[HttpRoute]:
        """Yield the routes of the page, its files and its data."""
        files = sorted(path for path in STATIC_FOLDER.iterdir() if path.suffix in _TYPES)
        for each in files:
            path, summary = f"{DASHBOARD_PATH}/{each.name}", ""
            if each.name == _INDEX:
                path, summary = DASHBOARD_PATH, "dashboard page (HTML, without data)"
            yield HttpRoute("GET", path, partial(_send_file, _File(each)), summary)
        yield HttpRoute("GET", f"{DASHBOARD_PATH}/", _redirect, "")
        data = "data of the dashboard as server-sent events"
        yield admin_route(self._reader, "GET", EVENTS_PATH, self._watch, data)

    def close(self) -> None:
        """End all streams."""
        self._frames.close()

    async def _watch(self, request: Request, _: Caller) -> None:
        if self._frames.watchers >= self._max_watchers:
            message = f"{self._max_watchers} dashboard connections are open, the maximum: close one, or retry"
            raise RequestRejected(Outcome.REJECTED_RATE_LIMITED, message, retry_after_s=10.0)
        try:
            with request.watch(), self._frames:
                await self._send_frames(request)
        except ClientGone:
            # The usual end of a stream.
            return

    async def _send_frames(self, request: Request) -> None:
        request.exchange.start_response(200, _STREAM_HEADERS, request.id_lines)
        while request.exchange.method != "HEAD" and (frame := await self._frames.next()) is not None:
            if not self._is_still_admin(request):
                break
            await request.write(data_event(frame))
        await request.write(b"", ends=True)

    def _is_still_admin(self, request: Request) -> bool:
        """Return whether the stream's key is still valid; it may have been revoked since."""
        try:
            self._reader.caller(request.headers).check_admin()
        except RequestRejected:
            return False
        return True


class _File:
    """A static file with its response headers."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.tag = b'"%s"' % hashlib.sha256(self.content).hexdigest()[:16].encode()
        self.headers: HeaderList = [(b"content-type", _TYPES[path.suffix]), (b"etag", self.tag), *_HEADERS]


def _send_file(file: _File, request: Request) -> None:
    if request.headers.get(b"if-none-match") == file.tag:
        request.exchange.start_response(304, file.headers, request.id_lines)
        request.exchange.write_chunk(b"", ends=True)
        return
    request.respond(200, file.headers, file.content)


def _redirect(request: Request) -> None:
    """Redirect to the path without a slash, because the page refers to its files by relative paths."""
    request.respond(308, [(b"location", b"../dashboard")], b"")
