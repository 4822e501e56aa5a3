"""Settings changed in a running gateway."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.errors import SettingsError
from serve_app.serving.gateway import ApiKey, GatewaySettings, ServedModel
from serve_app.serving.gateway.settings import gateway_hot
from tests.serving.channel.harness import wait_until

from .builders import MODEL
from .conftest import GatewayHarness, running_gateway

OLD, NEW = (ApiKey(tenant="a", key=f"key-{word}") for word in ("old", "new"))
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3}


def changes(**settings: Any) -> dict[str, Any]:
    return gateway_hot(GatewaySettings(models=(ServedModel(name=MODEL),), **settings))


async def status(http: httpx.AsyncClient, key: ApiKey, **body: Any) -> int:
    headers = {"authorization": f"Bearer {key.key}", "origin": "https://a.example"}
    return (await http.post("/v1/completions", json={**PROMPT, **body}, headers=headers)).status_code


async def test_keys_rotate_without_a_rejection_and_open_answers_continue() -> None:
    async with running_gateway(keys=(OLD,)) as harness:
        http, engine = harness.http, harness.engine
        engine.token_delay_s = 0.05
        assert (await status(http, OLD), await status(http, NEW)) == (200, 401)
        harness.gateway.change(changes(keys=(OLD, NEW)))
        assert (await status(http, OLD), await status(http, NEW)) == (200, 200)
        running = asyncio.create_task(status(http, OLD, max_tokens=10))
        await wait_until(lambda: engine.running)
        harness.gateway.change(changes(keys=(NEW,)))
        assert (await status(http, OLD), await status(http, NEW)) == (401, 200)
        assert await running == 200


async def test_limits_and_pages_that_may_call_change(harness: GatewayHarness) -> None:
    http, origin = harness.http, {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in (await http.get("/health", headers=origin)).headers
    harness.gateway.change({"cors": {"allow_origins": ["https://a.example"]}, "max_body_bytes": 1_024})
    assert (await http.get("/health", headers=origin)).headers["access-control-allow-origin"]
    answer = await http.post("/v1/completions", json={**PROMPT, "prompt": "a" * 2_000})
    assert answer.status_code == 413
    # Settings that are left out keep their values.
    harness.gateway.change({"log_requests": False})
    assert (await http.get("/health", headers=origin)).headers["access-control-allow-origin"]


async def test_a_key_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    missing = ApiKey(tenant="b", file=str(tmp_path / "missing"))
    async with running_gateway(keys=(OLD,)) as harness:
        with pytest.raises(SettingsError, match="tenant b"):
            harness.gateway.change(changes(keys=(missing,), max_body_bytes=1_024))
        assert await status(harness.http, ApiKey(tenant="c", key="other")) == 401
        assert await status(harness.http, OLD, prompt="a" * 2_000) == 200
