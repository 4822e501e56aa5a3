"""Odd requests to every route over HTTP: none is answered with 500 or leaves a traceback in the log."""

import asyncio
import itertools
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from serve_app.serving.api_keys import KeyRecord, changed_keys, hashed
from serve_app.serving.gateway import ApiKey
from serve_app.serving.gateway.admin import ENDPOINTS_PATH, KEYS_PATH, MODE_PATH, EndpointChange, ModeChange
from serve_app.serving.gateway.batches.api import BATCHES_PATH, FILES_PATH, BatchBody
from serve_app.serving.gateway.router import HttpRoute
from tests.fuzz.mutations import ODD_TEXTS, ODD_VALUES
from tests.fuzz.threaded_gateway import any_engine
from tests.serving.gateway.fleet import Fleet, fleet_of

_AT_ONCE = 16
_ADMIN = b"Bearer k1"
_JSON = b"application/json"
_BODIES = (
    *ODD_TEXTS,
    *(b"9" * 5_000, b"1e999", b"-0", b'"\xed\xa0\x80"', b'{"\xff":1}', b"{}" * 1_000, b"\x00" * 1_000),
    *(b'{"model":"tiny\xff"}', b'{"url":"\xff"}', b'{"tenant":"\xc3"}', b'{"a":' + b"[" * 99_999),
)
_QUERIES = (
    *(
        "limit=" + "9" * 5_000,
        "limit=" + "0" * 9 + "1" * 30,
        "limit=" + "1".zfill(9) + "9" * 5_000,
        "limit=²",
    ),
    *("limit=%FF", "limit=-1&order=%00", "after=" + "%ED%A0%80", "after=%00", "&" * 2_000, "=", "%", "%zz"),
    *("model=%FF", "replica=%FF", "purpose=%FF", "full=%FF", "stream=true&starting_after=" + "9" * 5_000),
    "&".join(f"a{number}=1" for number in range(1_500)),
)
_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    *(
        (b"authorization", value)
        for value in (b"", b"Bearer", b"Bearer \xff", b"Basic \xff", b"Bearer x" * 99)
    ),
    *((b"x-api-key", value) for value in (b"", b"\xff", b"ewsjf__", b"ewsjf_\xff_\xff")),
    *((b"content-type", value) for value in (b"", b"\xff", b"text/plain; charset=\xff", b"a/b; c*=x''%FF")),
    *((b"content-type", b"multipart/form-data" + end) for end in (b"", b"; boundary=", b";boundary*0=\xff")),
    *((b"content-encoding", value) for value in (b"gzip", b"\xff")),
    *((b"accept", value) for value in (b"", b";q=x", b"*/*;q=" + b"9" * 5_000, b"\xff,,;")),
    *(
        (name, value)
        for name in (b"x-tenant", b"x-session-id", b"x-request-id")
        for value in (b"\xff", b"a" * 5_000)
    ),
    *((b"x-priority", value) for value in (b"", b"\xff", b"9" * 5_000)),
    *((b"x-queue-timeout-s", value) for value in (b"nan", b"-1", b"1e999", b"9" * 5_000, b"\xff")),
    *((b"x-slo-ttft-ms", value) for value in (b"inf", b"9" * 5_000, b"\xff")),
    *((b"x-queue", b"\xff"), (b"x-slo", b"\xff"), (b"traceparent", b"\xff"), (b"if-none-match", b"\xff")),
    *((b"origin", b"\xff"), (b"host", b"\xff"), (b"expect", b"\xff"), (b"range", b"bytes=-9,\xff")),
)
_PARAMETERS = ("%00", "%FF", "%ED%A0%80", "%F0%9F%98%80", "a%2Fb", "..", "9" * 5_000, "x%0D%0Ay", "{x}", "%")
_FORM = b"multipart/form-data; boundary=b"
_FORMS = (
    *(
        b"",
        b"--b",
        b"--b--",
        b"--b\r\n\r\n\r\n--b--",
        b"--b\r\n\xff: \xff\r\n\r\nx\r\n--b--",
        b"\xff" * 1_000,
    ),
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="\xff"\r\n\r\n\xff\r\n--b--\r\n',
    b"--b\r\ncontent-disposition: form-data; name*=x''%FF; name=\"purpose\"\r\n\r\nbatch\r\n--b--\r\n",
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    + b"[" * 9_999
    + b"\r\n--b--\r\n",
    b'--b\r\ncontent-disposition: form-data; name="expires_after[seconds]"\r\n\r\n'
    + b"9" * 4_000
    + b"\r\n--b--\r\n",
)
_SHAPES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    KEYS_PATH: ({"tenant": "t"}, KeyRecord.__struct_fields__),
    KEYS_PATH + "/{key_id}": ({}, KeyRecord.__struct_fields__),
    ENDPOINTS_PATH: ({"url": "http://x"}, EndpointChange.__struct_fields__),
    MODE_PATH: ({"active_share": 1.0}, ModeChange.__struct_fields__),
    BATCHES_PATH: ({"input_file_id": "file-1", "endpoint": "/v1/completions"}, BatchBody.__struct_fields__),
}


@dataclass(frozen=True)
class OddRequest:
    """A request to a route; everything else of it is usual."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""
    header: tuple[bytes, bytes] = (b"x-nothing", b"")
    content_type: bytes = _JSON
    is_admin: bool = True

    async def send(self, http: httpx.AsyncClient) -> int:
        """Send it, and return the status."""
        headers = {b"content-type": self.content_type}
        if self.is_admin:
            headers[b"authorization"] = _ADMIN
        headers[self.header[0]] = self.header[1]
        url = f"{self.path}?{self.query}" if self.query else self.path
        async with http.stream(self.method, url, headers=headers, content=self.body) as answer:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                return answer.status_code
            await answer.aread()
            return answer.status_code


def odd_requests(route: HttpRoute) -> Iterator[OddRequest]:
    """Yield requests to a route that each have one odd part."""
    path = re.sub(r"{\w+}", "x", route.path)
    usual = OddRequest(route.method, path, body=b"" if route.method == "GET" else b"{}")
    yield from (replace(usual, body=body) for body in _BODIES)
    yield from (replace(usual, query=query) for query in _QUERIES)
    yield from (replace(usual, header=header) for header in _HEADERS)
    if path != route.path:
        before, after = re.split(r"{\w+}", route.path)
        yield from (replace(usual, path=before + odd + after) for odd in _PARAMETERS)
    if route.path in {FILES_PATH, "/v1/audio/transcriptions", "/v1/audio/translations"}:
        yield from (replace(usual, body=form, content_type=_FORM) for form in _FORMS)
    document, fields = _SHAPES.get(route.path, ({}, ()))
    for field in fields if route.method == "POST" else ():
        for value in ODD_VALUES:
            yield replace(usual, body=json.dumps({**document, field: value}).encode())
        broken = json.dumps({**document, field: "INVALID"}).encode().replace(b"INVALID", b"\xff")
        yield replace(usual, body=broken)


async def _faults(fleet: Fleet, requests: Iterator[OddRequest]) -> list[OddRequest]:
    found: list[OddRequest] = []

    async def send() -> None:
        for request in requests:
            found.extend([request] if await request.send(fleet.http) == 500 else [])

    await asyncio.gather(*(send() for _ in range(_AT_ONCE)))
    return found


@pytest.mark.parametrize("is_admin", [True, False])
async def test_no_odd_request_to_any_route_is_a_fault_of_the_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_admin: bool
) -> None:
    keys_file = tmp_path / "keys.json"
    key = KeyRecord(id="x", hash=hashed("secret"), tenant="t", created_at=datetime.now(UTC))
    changed_keys(keys_file, lambda keys: [*keys, key])
    keys = (ApiKey(tenant="ops", key="k1", admin=True),)
    async with fleet_of([any_engine], keys=keys, keys_file=str(keys_file)) as fleet:
        fleet.gateway.start_batches(tmp_path / "batches")
        requests = (
            replace(request, is_admin=is_admin)
            for route in fleet.gateway.router.routes
            for request in odd_requests(route)
        )
        # Without a key, most requests are rejected before anything of them is read.
        faults = await _faults(fleet, itertools.islice(requests, 0, None, 1 if is_admin else 5))
        await fleet.gateway.drain(0.0, 1.0)
    assert [repr(each)[:200] for each in faults] == []
    logged = [each for each in caplog.records if each.exc_info or "Traceback" in each.getMessage()]
    assert logged == []
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
