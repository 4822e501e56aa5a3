"""Settings changed in a running gateway."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.errors import SettingsError
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from serve_app.serving.gateway.settings import gateway_hot

from .builders import MODEL, Engine, FakeDispatcher, serving

OLD, NEW = (ApiKey(tenant="a", key=f"key-{word}") for word in ("old", "new"))
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3}


def settings(**changes: Any) -> GatewaySettings:
    return GatewaySettings(models=(ServedModel(name=MODEL),), **changes)


def client(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")


async def status(http: httpx.AsyncClient, key: ApiKey, **body: Any) -> int:
    headers = {"authorization": f"Bearer {key.key}", "origin": "https://a.example"}
    return (await http.post("/v1/completions", json={**PROMPT, **body}, headers=headers)).status_code


async def test_keys_rotate_without_a_rejection_and_open_answers_continue() -> None:
    engine = Engine(token_delay_s=0.05)
    async with serving(engine) as replica:
        gateway = Gateway(settings(keys=(OLD,)), {MODEL: FakeDispatcher([replica])}, "g")
        async with serving(gateway) as port, client(port) as http:
            assert (await status(http, OLD), await status(http, NEW)) == (200, 401)
            gateway.change(gateway_hot(settings(keys=(OLD, NEW))))
            assert (await status(http, OLD), await status(http, NEW)) == (200, 200)
            running = asyncio.create_task(status(http, OLD, max_tokens=10))
            while not engine.running:  # noqa: ASYNC110 - a plain count
                await asyncio.sleep(0.01)
            gateway.change(gateway_hot(settings(keys=(NEW,))))
            assert (await status(http, OLD), await status(http, NEW)) == (401, 200)
            assert await running == 200
        gateway.close()


async def test_limits_and_pages_that_may_call_change() -> None:
    gateway = Gateway(settings(), {MODEL: FakeDispatcher([])}, "g")
    async with serving(gateway) as port, client(port) as http:
        origin = {"origin": "https://a.example"}
        assert "access-control-allow-origin" not in (await http.get("/health", headers=origin)).headers
        gateway.change({"cors": {"allow_origins": ["https://a.example"]}, "max_body_bytes": 1_024})
        assert (await http.get("/health", headers=origin)).headers["access-control-allow-origin"]
        answer = await http.post("/v1/completions", json={**PROMPT, "prompt": "a" * 2_000})
        assert answer.status_code == 413
        # Settings that are left out keep their values.
        gateway.change({"log_requests": False})
        assert (await http.get("/health", headers=origin)).headers["access-control-allow-origin"]
    gateway.close()


async def test_a_key_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    gateway = Gateway(settings(keys=(OLD,)), {MODEL: FakeDispatcher([])}, "g")
    missing = ApiKey(tenant="b", file=str(tmp_path / "missing"))
    wrong = settings(keys=(missing,), max_body_bytes=1_024)
    with pytest.raises(SettingsError, match="tenant b"):
        gateway.change(gateway_hot(wrong))
    async with serving(gateway) as port, client(port) as http:
        assert await status(http, ApiKey(tenant="c", key="other")) == 401
        answer = await http.get("/v1/models", headers={"authorization": f"Bearer {OLD.key}"})
        assert answer.status_code == 200
    gateway.close()
