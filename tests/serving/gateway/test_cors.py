"""CORS: preflights, and the headers that let a page's script read an answer."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from serve_app.errors import SettingsError
from serve_app.serving.gateway import ApiKey
from serve_app.serving.gateway.router import CorsSettings

from .builders import MODEL, chat, reply_json
from .conftest import GatewayHarness, running_gateway

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    # Sent by OpenAI's JavaScript SDK, plus a header of this application.
    "access-control-request-headers": "authorization,content-type,x-stainless-os,x-priority",
}


def gateway_allowing(*origins: str, **changes: Any) -> AbstractAsyncContextManager[GatewayHarness]:
    return running_gateway(cors=CorsSettings(allow_origins=origins), **changes)


def words(answer: httpx.Response, name: str) -> set[str]:
    return {word.strip().lower() for word in answer.headers.get(name, "").split(",")}


async def test_a_preflight_is_answered_without_a_key() -> None:
    async with gateway_allowing(PAGE, keys=(ApiKey(tenant="a", key="k"),)) as harness:
        answer = await harness.http.options(CHAT, headers=PREFLIGHT)
        assert answer.status_code == 204
        assert answer.content == b""
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert set(PREFLIGHT["access-control-request-headers"].split(",")) <= words(
            answer, "access-control-allow-headers"
        )
        assert answer.headers["access-control-max-age"] == "600"
        assert "origin" in words(answer, "vary")
        # A preflight grants nothing: the key is still required, and the script may read the rejection.
        rejected = await harness.http.post(CHAT, json=chat(), headers={"origin": PAGE})
        assert rejected.status_code == 401
        assert rejected.headers["access-control-allow-origin"] == PAGE


async def test_a_preflight_without_cors_names_the_setting() -> None:
    async with gateway_allowing() as harness:
        answer = await harness.http.options(CHAT, headers=PREFLIGHT)
    assert answer.status_code == 405
    assert "set gateway.cors.allow_origins" in answer.json()["error"]["message"]


@pytest.mark.parametrize("origins", [(PAGE, "https://other.example.com"), ("*",)])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_may_be_read_by_the_page_with_its_scheduling(
    origins: tuple[str, ...], streamed: bool
) -> None:
    async with gateway_allowing(*origins) as harness:
        answer = await harness.http.post(CHAT, json=chat(stream=streamed), headers={"origin": PAGE})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ("*" if origins == ("*",) else PAGE)
        exposed = words(answer, "access-control-expose-headers")
        ours = {name for name in answer.headers if name.startswith("x-")} - {"x-engine"}
        assert {"x-pool", "x-queue-wait-ms"} <= ours <= exposed
        assert {"retry-after", "retry-after-ms"} <= exposed
        assert "access-control-allow-credentials" not in answer.headers


async def test_errors_of_every_kind_carry_the_headers() -> None:
    async with gateway_allowing(PAGE) as harness:
        for send in (
            harness.http.post(CHAT, content=b"{", headers={"origin": PAGE}),
            harness.http.get("/nothere", headers={"origin": PAGE}),
            harness.http.get(CHAT, headers={"origin": PAGE}),
        ):
            answer = await send
            assert answer.status_code in (400, 404, 405)
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "error" in answer.json()


async def test_another_origin_is_not_allowed_not_even_by_the_engine() -> None:
    async with gateway_allowing(PAGE) as harness:
        foreign = {"origin": "https://evil.example.com"}
        preflight = await harness.http.options(CHAT, headers={**PREFLIGHT, **foreign})
        assert preflight.status_code == 400
        assert "https://evil.example.com" in preflight.json()["error"]["message"]
        assert "access-control-allow-origin" not in preflight.headers
        answer = await harness.http.post(CHAT, json=chat(), headers=foreign)
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origins", [(), (PAGE,)])
async def test_an_engines_own_cors_headers_are_not_forwarded(origins: tuple[str, ...]) -> None:
    async with gateway_allowing(*origins) as harness:
        open_to_all = [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"x-a")]

        async def answer_as_vllm(scope, parsed, send) -> None:  # type: ignore[no-untyped-def]
            await reply_json(send, 200, {"model": MODEL, "choices": []}, open_to_all)

        harness.engine.answers.append(answer_as_vllm)
        answer = await harness.http.post(CHAT, json=chat(), headers={"origin": "https://evil.example.com"})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
        assert "x-a" not in words(answer, "access-control-expose-headers")
        assert b"origin" not in harness.engine.heads[0]


@pytest.mark.parametrize(
    ("path", "allow"), [(CHAT, "POST"), ("/v1/models", "GET, HEAD"), ("/health", "GET, HEAD")]
)
async def test_without_the_setting_a_preflight_is_rejected_with_the_methods_there_are(
    harness: GatewayHarness, path: str, allow: str
) -> None:
    answer = await harness.http.options(path, headers=PREFLIGHT)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allow
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    ["chat.example.com", "https://a.example.com/", "https://a.example.com/chat", "https://A.example.com", ""],
)
def test_an_invalid_origin_is_rejected(origin: str) -> None:
    with pytest.raises(SettingsError, match="allow_origins"):
        CorsSettings(allow_origins=(origin,))


def test_an_origin_may_have_a_port() -> None:
    assert CorsSettings(allow_origins=("http://localhost:5173", "*"))
