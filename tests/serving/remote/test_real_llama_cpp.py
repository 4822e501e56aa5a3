"""llama.cpp server with real weights: its adapter, and the gateway in front of it.

`scripts/fetch_llama_server` downloads both; each server starts within seconds on the CPU.
"""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from serve_app.core.events import DispatchFailure
from serve_app.engines.adapters import EngineServer, PageResponse, identify
from serve_app.engines.adapters.server import stated_context_limit
from serve_app.serving.gateway.answer.responses import failure_of
from tests.engines.servers import free_port
from tests.serving.channel.harness import wait_until

from .servers import watched

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "models" / "llama.cpp"
MODEL = "smol"
SLOTS, CONTEXT = 2, 1024
_START_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _fetched() -> None:
    subprocess.run([ROOT / "scripts" / "fetch_llama_server"], check=True)


@contextlib.asynccontextmanager
async def llama_server(*options: str) -> AsyncIterator[str]:
    """Start a server with this context per slot; yield its URL."""
    port = free_port()
    command = [
        *(
            str(FOLDER / "bin" / "llama-server"),
            "--model",
            str(next(FOLDER.glob("*.gguf"))),
            "--alias",
            MODEL,
        ),
        *("--host", "127.0.0.1", "--port", str(port), "--threads", "2", "--no-webui"),
        *("--ctx-size", str(SLOTS * CONTEXT), "--parallel", str(SLOTS), *options),
    ]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(FOLDER / "bin")}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(_START_S), httpx.AsyncClient(base_url=url) as client:
            while not await _is_healthy(client):
                assert process.returncode is None, "it ended before it served"
                await asyncio.sleep(0.2)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


async def described(client: httpx.AsyncClient) -> EngineServer:
    async def get(path: str) -> PageResponse:
        answer = await client.get(path)
        return PageResponse(answer.status_code, answer.content)

    return await identify(get)


@pytest.mark.parametrize(
    ("options", "page", "reports_queue"), [(("--metrics",), "/metrics", True), ((), "/slots", False)]
)
async def test_its_pages_have_its_limits_and_its_load(
    options: tuple[str, ...], page: str, reports_queue: bool
) -> None:
    async with llama_server(*options) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        server = await described(client)
        assert (server.kind, server.metrics_path) == ("llama.cpp", page)
        assert [listing.model for listing in server.models] == [MODEL]
        assert (server.limits.max_model_len, server.limits.max_num_seqs) == (CONTEXT, SLOTS)
        assert server.limits.kv_tokens is None
        assert any("queue" in lack for lack in server.limitations) is not reports_queue

        async def answer() -> httpx.Response:
            body = {"model": MODEL, "prompt": "Count: one two", "max_tokens": 200, "ignore_eos": True}
            return await client.post("/v1/completions", json=body)

        # One more request than slots: it queues.
        answers = [asyncio.create_task(answer()) for _ in range(SLOTS + 1)]
        seen = set()
        while not all(each.done() for each in answers):
            reading = server.read((await client.get(page)).content)
            seen.add((reading.running, reading.waiting))
            await asyncio.sleep(0.05)
        assert {each.result().status_code for each in answers} == {200}
        assert (SLOTS, 1 if reports_queue else None) in seen, seen
        idle = server.read((await client.get(page)).content)
        assert (idle.running, idle.waiting) == (0, 0 if reports_queue else None)
        if reports_queue:
            assert idle.token_gaps == 200 * (SLOTS + 1)
            assert idle.token_gaps_s is not None
            assert 0 < idle.token_gaps_s < _START_S


@pytest.mark.parametrize("stream", [False, True])
async def test_its_rejection_is_understood_and_states_its_context(stream: bool) -> None:
    async with llama_server() as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        body = {"model": MODEL, "prompt": "word " * 3_000, "max_tokens": 5, "stream": stream}
        rejected = await client.post("/v1/completions", json=body)
    failure = failure_of(rejected.status_code, [], rejected.content)
    assert failure is not None, rejected.text
    assert failure.failure is DispatchFailure.TOO_LONG
    assert stated_context_limit(str(failure)) == CONTEXT


async def test_the_gateway_serves_it_and_rejects_too_long_prompts_like_it() -> None:
    async with llama_server("--metrics") as url, watched(url, model=MODEL) as fleet:
        await wait_until(lambda: len(fleet.open()) == 1, "it serves")
        request_body = {
            "model": MODEL,
            "prompt": "The capital of France is",
            "max_tokens": 8,
            "temperature": 0,
        }
        whole = await fleet.send_request(**request_body)
        assert "Paris" in whole.json()["choices"][0]["text"], whole.text
        streamed = await fleet.send_request(**request_body, stream=True)
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
        text = "".join(
            choice["text"] for event in events[:-1] for choice in json.loads(event).get("choices", ())
        )
        assert (events[-1], text) == ("[DONE]", whole.json()["choices"][0]["text"])
        (replica,) = fleet.control_plane.live.status()["replicas"].values()
        assert (replica["max_model_len"], replica["max_num_seqs"]) == (CONTEXT, SLOTS)
        # Its lower bound exceeds every pool, so it never reaches the server.
        long = await fleet.send_request(model=MODEL, prompt="word " * 20_000)
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded"), long.text
        # By its bounds it may fit; the server finds that it does not.
        near = await fleet.send_request(model=MODEL, prompt="word " * 1_100)
        assert (near.status_code, near.json()["error"]["code"]) == (400, "context_length_exceeded"), near.text
        assert "1024" in near.json()["error"]["message"] or "1,024" in near.json()["error"]["message"]
