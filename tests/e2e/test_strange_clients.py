"""Browsers and HTTP/1.0 clients."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.served import Served

# The first test of a session waits until the application has started.
pytestmark = pytest.mark.timeout(300)

CHAT = "/v1/chat/completions"
ASKED = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
# The origin that the shared application allows; see `tests/e2e/served.py`.
PAGE = "https://chat.example.com"


def exchange(app: Served, head: str, body: bytes) -> tuple[dict[str, str], bytes]:
    """Send one HTTP/1.0 request; return headers and body of the answer, which ends with the connection."""
    address = urlsplit(app.url)
    assert address.port is not None
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    head_bytes, _, content = answer.partition(b"\r\n\r\n")
    lines = head_bytes.decode().lower().split("\r\n")
    assert lines[0].endswith(" 200 ok"), answer[:500]
    return dict(line.split(": ", 1) for line in lines[1:]), content


@pytest.mark.parametrize("connection", ["", "connection: close\r\n", "connection: keep-alive\r\n"])
def test_an_http10_client_gets_a_stream_without_chunks(app: Served, connection: str) -> None:
    payload = {**ASKED, "stream": True}
    head = f"POST {CHAT} HTTP/1.0\r\nhost: a\r\ncontent-type: application/json\r\n{connection}"
    headers, body = exchange(app, head, json.dumps(payload).encode())
    assert "transfer-encoding" not in headers
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_an_http10_client_gets_a_non_streamed_answer_with_its_length(app: Served) -> None:
    headers, body = exchange(app, f"POST {CHAT} HTTP/1.0\r\nhost: a\r\n", json.dumps(ASKED).encode())
    assert headers["content-length"] == str(len(body))
    assert json.loads(body)["choices"]


def test_a_page_may_send_requests_and_read_the_answer(app: Served) -> None:
    asking = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = httpx.options(f"{app.url}{CHAT}", headers=asking, timeout=60)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == PAGE
    payload = {**ASKED, "stream": True}
    answer = httpx.post(f"{app.url}{CHAT}", json=payload, headers={"origin": PAGE}, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    exposed = answer.headers["access-control-expose-headers"]
    assert {"x-pool", "x-request-id"} <= set(exposed.split(", "))


def test_another_page_is_rejected(app: Served) -> None:
    asking = {"origin": "https://evil.example.com", "access-control-request-method": "POST"}
    preflight = httpx.options(f"{app.url}{CHAT}", headers=asking, timeout=60)
    assert preflight.status_code == 400
    assert "access-control-allow-origin" not in preflight.headers
