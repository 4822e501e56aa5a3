"""vLLM's own server with the demo model, and requests to it, for tests with real engines."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from experiments.common.application import free_port
from tests.e2e.served import ROOT, Served
from tests.vllm_server import Option, VllmServer, VllmServerSettings, started_vllm

MODEL = "SmolLM2-135M-Instruct"
# Engines start in a minute each on an idle machine, and share two cores.
ENGINE_START_S = 420.0
# About 3,000 tokens of English.
LONG = (ROOT / "LICENSE").read_text()[:11_000] + "\nWhat is the capital of France?"

needs_model = pytest.mark.skipif(
    not (ROOT / "models" / MODEL).is_dir(), reason="scripts/fetch_demo_model has not been run"
)


@contextlib.contextmanager
def vllm_server(log: Path, names: tuple[str, ...] = (MODEL,), **options: Option) -> Iterator[VllmServer]:
    """Run a server with these names and vLLM options; yield it once it answers."""
    settings = VllmServerSettings(
        model=f"models/{MODEL}",
        served_model_names=names,
        options={"max_model_len": 8192, "dtype": "float32", "enforce_eager": True, **options},
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    with started_vllm(settings, free_port(), log) as server:
        server.wait_until_healthy()
        yield server


def shipped(name: str) -> dict[str, Any]:
    """Return the arguments of a shipped configuration."""
    content = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    args: dict[str, Any] = content["applications"][0]["args"]
    return args


def sdk(app: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", timeout=300, max_retries=0)


def send_request(client: openai.OpenAI, text: str, **options: Any) -> tuple[str, Any]:
    """Return the serving pool, and the completion."""
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "temperature": 0, **options}
    raw = client.chat.completions.with_raw_response.create(
        messages=[{"role": "user", "content": text}], **fields
    )
    return raw.headers["x-pool"], raw.parse()


def check_capital_of_france(client: openai.OpenAI) -> None:
    _, answer = send_request(client, "What is the capital of France?")
    assert "Paris" in (answer.choices[0].message.content or "")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=20,
        temperature=0,
        stream=True,
    )
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
