"""A real vLLM engine in this process, with helpers to inspect it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from serve_app.engines.engine import Engine, EngineLimits
from serve_app.engines.vllm.engine import VllmEngine, VllmEngineSettings
from serve_app.errors import EngineError
from tests.engines.servers import serving
from tests.vllm_server import read_counters

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "models/tiny-random-llama"
SMOLLM2 = ROOT / "models/SmolLM2-135M-Instruct"
MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 4
ARGS = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_NUM_SEQS,
    "dtype": "float32",
    "enforce_eager": True,
}
# Without this, random weights write spaces for ever where a schema allows them.
COMPACT_JSON = {"structured_outputs_config": {"disable_any_whitespace": True, "backend": "xgrammar"}}
# One thread is enough for small models. Threads of several engines would spin while they wait for each other.
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}
# The model runs in the process of vLLM's scheduler. Importing vLLM is most of a start, and one process less
# imports it.
QUICK_START = {**ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Only a defect takes this long, however busy the machine is; a test has twice this time.
ANSWER_TIMEOUT_S = 300.0

Prompt = str | list[int]
"""Text, or token IDs."""


@dataclass
class Running:
    """A running engine and a client."""

    engine: VllmEngine
    limits: EngineLimits
    client: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": "m", **body})

    async def is_idle(self) -> bool:
        load = await self.engine.load()
        return load.waiting + load.running == 0


def _is_made(model: Path) -> bool:
    return model.is_dir()


@contextlib.asynccontextmanager
async def running(model: Path, **settings: Any) -> AsyncIterator[Running]:
    assert _is_made(model), f"{model} is missing: run scripts/fetch_demo_model"
    given = {"served_model_names": ("m",), "args": ARGS, "env": ENV, **settings}
    engine = VllmEngine(VllmEngineSettings(model=str(model), **given))
    limits = await engine.start()
    try:
        async with serving(engine.app) as url, _client(url) as client:
            yield Running(engine, limits, client)
    finally:
        await engine.stop()


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S)


def unshared_prompt(number: int, count: int) -> Prompt:
    """Return a prompt of this length that shares no prefix cache block with other numbers."""
    return [1_000 + number] * count


@contextlib.asynccontextmanager
async def open_streams(
    client: httpx.AsyncClient, prompts: Sequence[Prompt], priority: int = 0
) -> AsyncIterator[None]:
    """Keep a stream of each prompt open; some wait for their first token, and all are cut at the end."""
    fixed = {"model": "m", "max_tokens": 200, "stream": True, "ignore_eos": True, "priority": priority}

    async def read(prompt: Prompt) -> None:
        body = {**fixed, "prompt": prompt}
        while True:  # a fast machine ends a stream before its load can be read
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    pass

    reading = [asyncio.create_task(read(prompt)) for prompt in prompts]
    try:
        yield
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def has_measured_tpot(engine: Engine) -> bool:
    """Return whether gaps between tokens were measured, which takes two readings of the metrics."""
    return (await engine.load()).tpot_s is not None


async def runs(started: Running, sequences: int) -> bool:
    return (await started.engine.load()).running == sequences


async def hangs(engine: Engine) -> bool:
    try:
        await engine.load()
    except EngineError as error:
        return "hangs" in str(error)
    return False


async def preemptions(started: Running) -> float:
    """Return the number of preemptions so far, from the engine's metrics."""
    return read_counters((await started.client.get("/metrics")).text).preemptions


def engine_core() -> psutil.Process:
    """Return the process of vLLM's scheduler."""
    (core,) = [one for one in engine_processes() if "EngineCore" in " ".join(one.cmdline())]
    return core


def engine_processes() -> list[psutil.Process]:
    """Return the child processes of vLLM, except multiprocessing's resource tracker."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def events(answer: httpx.Response) -> list[Any]:
    """Return the data of a stream without its end mark, which is checked."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
