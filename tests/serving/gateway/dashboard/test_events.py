"""Dashboard over HTTP: public files under a strict policy; bounded, shared frames for admins."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.serving.api_keys import changed_keys
from serve_app.serving.gateway import ApiKey, Gateway, UpstreamSettings
from serve_app.serving.gateway.dashboard import pages
from serve_app.serving.gateway.dashboard.pages import STATIC_FOLDER, Frames
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.builders import MODEL, Answers
from tests.serving.gateway.conftest import running_gateway
from tests.serving.gateway.dashboard.harness import frames_every
from tests.serving.test_api_keys import record

EVENTS = "/dashboard/events"
# A second in production.
INTERVAL_S = 0.1
ADMIN = {"authorization": "Bearer k1"}


@dataclass
class CountedOverview:
    """Scheduler overview that counts its reads.

    Attributes:
        padding: bytes added to a frame.
    """

    count: int = 0
    padding: int = 0
    failure: Exception | None = None
    hangs: bool = False
    content: dict[str, Any] = field(default_factory=dict)

    async def overview(self) -> dict[str, Any]:
        self.count += 1
        if self.hangs:
            await asyncio.sleep(3600)
        if self.failure is not None:
            raise self.failure
        return {"model": MODEL, "look": self.count, "padding": "x" * self.padding, **self.content}


@dataclass
class DashboardServer:
    http: httpx.AsyncClient
    looks: CountedOverview
    app: Gateway
    frames: Frames
    port: int
    keys: Path
    secret: str


@asynccontextmanager
async def dashboard_of(tmp_path: Path, **upstream: Any) -> AsyncIterator[DashboardServer]:
    looks, path = CountedOverview(), tmp_path / "keys.json"
    found, secret = record(admin=True)
    changed_keys(path, lambda _: [found])
    with frames_every(INTERVAL_S) as frames:
        async with running_gateway(
            keys=(ApiKey(tenant="ops", key="k1", admin=True),),
            keys_file=str(path),
            queries=Answers(overview=looks.overview),
            upstream=UpstreamSettings(**upstream),
        ) as harness:
            app, http, port = harness.gateway, harness.http, harness.port
            yield DashboardServer(http, looks, app, frames[0], port, path, secret)


@pytest.fixture
async def dashboard(tmp_path: Path) -> AsyncIterator[DashboardServer]:
    async with dashboard_of(tmp_path) as made:
        yield made


@asynccontextmanager
async def watching(
    dashboard: DashboardServer, headers: dict[str, str] | None = None
) -> AsyncIterator[AsyncIterator[Any]]:
    async with dashboard.http.stream("GET", EVENTS, headers=headers or ADMIN) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        yield frames_of(answer)


async def frames_of(answer: httpx.Response) -> AsyncIterator[Any]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def test_the_page_and_its_files_are_open_and_name_nothing_from_elsewhere(
    dashboard: DashboardServer,
) -> None:
    page = await dashboard.http.get("/dashboard")
    named = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert {"dashboard/main.js", "dashboard/style.css", "dashboard/icon.svg"} == set(named)
    modules = {f"/dashboard/{path.name}" for path in STATIC_FOLDER.iterdir() if path.suffix != ".html"}
    assert {f"/{name}" for name in named} < modules
    for path in ("/dashboard", *modules):
        answer = await dashboard.http.get(path)
        assert answer.status_code == 200, path
        assert "http://" not in answer.text.replace("http://www.w3.org/", ""), path
        assert "https://" not in answer.text, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in modules:
        for name in re.findall(r'from "\./([^"]+)"', (await dashboard.http.get(path)).text):
            assert f"/dashboard/{name}" in modules, (path, name)


async def test_a_browser_with_a_cached_file_gets_not_modified(dashboard: DashboardServer) -> None:
    first = await dashboard.http.get("/dashboard/main.js")
    again = await dashboard.http.get("/dashboard/main.js", headers={"if-none-match": first.headers["etag"]})
    other = await dashboard.http.get("/dashboard/dom.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert other.status_code == 200
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"


async def test_the_page_with_a_slash_is_the_page(dashboard: DashboardServer) -> None:
    answer = await dashboard.http.get("/dashboard/")
    assert (answer.status_code, answer.headers["location"]) == (308, "../dashboard")
    assert (await dashboard.http.get("/dashboard/", follow_redirects=True)).text.startswith("<!doctype html>")


async def test_all_watchers_share_the_reads_and_nothing_is_read_before_or_after(
    dashboard: DashboardServer,
) -> None:
    assert dashboard.looks.count == 0
    async with watching(dashboard) as one, watching(dashboard) as other:
        seen = [
            ((await anext(one))["models"][0]["look"], (await anext(other))["models"][0]) for _ in range(3)
        ]
        assert dashboard.looks.count <= 5
        assert seen[0][0] < seen[1][0] < seen[2][0]
        shown = (await anext(one))["gateway"]
        assert (shown["id"][:2], shown["watchers"]) == ("gw", 2)
    await wait_until(lambda: dashboard.frames.watchers == 0)
    looked = dashboard.looks.count
    await asyncio.sleep(3 * INTERVAL_S)
    assert dashboard.looks.count == looked


async def test_a_scheduler_that_fails_or_hangs_is_named_until_it_recovers(
    dashboard: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_RESPONSE_TIMEOUT_S", 0.5)
    async with watching(dashboard) as frames:
        assert "error" not in (await anext(frames))["models"][0]
        dashboard.looks.failure = ConnectionError("gone")
        await anext(frames)
        content = (await anext(frames))["models"][0]
        assert content["model"] == MODEL
        assert "gone" in content["error"]
        dashboard.looks.failure, dashboard.looks.hangs = None, True
        await anext(frames)
        assert "has not responded for 0.5 s" in (await anext(frames))["models"][0]["error"]
        dashboard.looks.hangs = False
        await anext(frames)
        assert "error" not in (await anext(frames))["models"][0]


async def test_a_browser_that_stops_reading_blocks_no_other_and_is_disconnected(tmp_path: Path) -> None:
    async with dashboard_of(tmp_path, stalled_client_timeout_s=1.0) as dashboard:
        dashboard.looks.padding = 2_000_000
        reader, writer = await asyncio.open_connection("127.0.0.1", dashboard.port, limit=1024)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.write(f"GET {EVENTS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k1\r\n\r\n".encode())
        await wait_until(lambda: dashboard.frames.watchers == 1)
        async with watching(dashboard) as others:
            for _ in range(3):
                assert (await anext(others))["models"][0]["padding"]
        await wait_until(lambda: dashboard.frames.watchers == 0, within_s=10)
        writer.close()
        assert not reader.at_eof()


async def test_the_number_of_watchers_is_limited_and_the_next_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.serving.gateway.app.Dashboard", partial(pages.Dashboard, max_watchers=2))
    async with dashboard_of(tmp_path) as dashboard:
        async with watching(dashboard) as one, watching(dashboard) as other:
            await anext(one)
            await anext(other)
            rejected = await dashboard.http.get(EVENTS, headers=ADMIN)
            assert rejected.status_code == 429
            assert "2 dashboard connections are open" in rejected.json()["error"]["message"]
        await wait_until(lambda: dashboard.frames.watchers == 0)
        async with watching(dashboard) as again:
            await anext(again)


async def test_a_key_in_the_address_or_a_cookie_opens_nothing(dashboard: DashboardServer) -> None:
    answer = await dashboard.http.get(f"{EVENTS}?key=k1&access_token=k1", headers={"cookie": "key=k1"})
    assert answer.status_code == 401
    assert dashboard.looks.count == 0


async def test_a_key_that_is_revoked_sees_no_further_frame(dashboard: DashboardServer) -> None:
    headers = {"authorization": f"Bearer {dashboard.secret}"}
    async with watching(dashboard, headers) as frames, asyncio.timeout(20):
        await anext(frames)
        changed_keys(dashboard.keys, lambda _: [])
        # The key file is reloaded within two seconds.
        assert len([frame async for frame in frames]) <= 5 / INTERVAL_S
    assert (await dashboard.http.get(EVENTS, headers=headers)).status_code == 401


async def test_a_gateway_that_drains_ends_the_streams(dashboard: DashboardServer) -> None:
    async with watching(dashboard) as frames, asyncio.timeout(10):
        await anext(frames)
        assert await dashboard.app.drain(5.0, 1.0) == 0
        assert [frame async for frame in frames] == []


async def test_a_head_request_gets_no_stream(dashboard: DashboardServer) -> None:
    answer = await dashboard.http.head(EVENTS, headers=ADMIN)
    assert (answer.status_code, answer.content) == (200, b"")
    assert dashboard.looks.count <= 1
