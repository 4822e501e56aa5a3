"""Real vLLM engines that start for one test: in this process, and as remote endpoints."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from serve_app.engines.vllm.engine import VllmEngine, VllmEngineSettings
from serve_app.errors import EngineError
from tests.engines.servers import free_port, until
from tests.engines.vllm.real import (
    ARGS,
    ENV,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    QUICK_START,
    SMOLLM2,
    TINY,
    engine_processes,
    events,
    open_streams,
    running,
)
from tests.engines.vllm.serving_stack import serving_stack
from tests.engines.vllm.weights.adapters import write_adapter
from tests.serving.remote.servers import WatchedFleet, watched

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


async def test_smollm2_answers_a_question_and_leaves_no_process() -> None:
    async with running(SMOLLM2) as started:
        # 1 GiB at 30 layers, 3 heads of 64 and float32; vLLM reserves one of the blocks.
        assert started.limits.kv_tokens == (2**30 // (30 * 2 * 3 * 64 * 4) // 128 - 1) * 128
        # The priority is accepted, though this engine ignores it.
        question = {"messages": PARIS, "max_tokens": 12, "temperature": 0, "priority": 5}
        answer = await started.post("/v1/chat/completions", **question)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        stream = await started.post("/v1/chat/completions", **question, stream=True)
        streamed_text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(stream))
        assert "Paris" in streamed_text
        processes = engine_processes()
        assert len(processes) >= 2
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []
    with pytest.raises(EngineError, match=r"call start\(\) first"):
        await started.engine.check_health()


async def test_adapters_are_listed_used_loaded_and_unloaded(tmp_path: Path) -> None:
    for name in ("sql", "later"):
        write_adapter(TINY, tmp_path / name)
    args = {
        **ARGS,
        "enable_lora": True,
        "max_lora_rank": 8,
        "lora_modules": [f"sql={tmp_path / 'sql'}"],
    }
    env = {**QUICK_START, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    body = {"prompt": "Hi", "max_tokens": 8, "temperature": 0.0}
    async with running(TINY, args=args, env=env) as tiny, serving_stack(tiny.engine, tiny.limits) as stack:

        async def lists(*names: str) -> bool:
            found = (await stack.http.get("/v1/models")).json()["data"]
            return [model["id"] for model in found] == ["m", *names]

        await until(lambda: lists("sql"))
        base = await stack.http.post("/v1/completions", json={**body, "model": "m"})
        adapted = await stack.http.post("/v1/completions", json={**body, "model": "sql"})
        assert adapted.status_code == 200, adapted.text
        assert adapted.json()["model"] == "sql"
        assert adapted.json()["choices"][0]["text"] != base.json()["choices"][0]["text"]
        later = {"lora_name": "later", "lora_path": str(tmp_path / "later")}
        assert (await tiny.client.post("/v1/load_lora_adapter", json=later)).status_code == 200
        await until(lambda: lists("later", "sql"))
        answer = await stack.http.post("/v1/completions", json={**body, "model": "later"})
        assert answer.status_code == 200, answer.text
        gone = {"lora_name": "sql"}
        assert (await tiny.client.post("/v1/unload_lora_adapter", json=gone)).status_code == 200
        await until(lambda: lists("later"))
        answer = await stack.http.post("/v1/completions", json={**body, "model": "sql"})
        assert answer.status_code == 404


async def test_an_engine_whose_core_cannot_start_raises_and_leaves_no_process() -> None:
    # One KV cache block cannot hold a sequence of 512 tokens; only the engine core detects this.
    args = {**ARGS, "num_gpu_blocks_override": 1}
    engine = VllmEngine(VllmEngineSettings(model=str(TINY), args=args, env=ENV))
    with pytest.raises(EngineError, match=r"vLLM could not start .*see its log lines above for the cause"):
        await engine.start()
    _, alive = psutil.wait_procs(engine_processes(), timeout=10)
    assert alive == []


@contextlib.contextmanager
def vllm_server() -> Iterator[str]:
    """Start a vLLM server from the command line; yield its base URL before it listens."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={TINY}"]
    command += ["--served-model-name=m", f"--port={port}", "--dtype=float32", "--enforce-eager"]
    command += [f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-seqs={MAX_NUM_SEQS}", "--api-key=secret"]
    server = subprocess.Popen(command, env={**os.environ, **ENV}, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        server.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(processes, timeout=30)
        for process in alive:
            process.kill()


async def test_a_server_that_was_started_by_hand_is_an_endpoint_like_any_other() -> None:
    with vllm_server() as base_url:
        async with watched(base_url, api_key="secret", start_timeout_s=300.0, model="m") as fleet:
            (found,) = fleet.watcher.describe()
            assert (found["max_model_len"], found["models"]) == (MAX_MODEL_LEN, ["m"])
            assert int(str(found["kv_tokens"])) > MAX_MODEL_LEN
            await _use(fleet)


async def _use(fleet: WatchedFleet) -> None:
    client = fleet.http

    async def load_is(running: int, waiting: int) -> bool:
        # On a busy machine an engine's metrics may be late; the scheduler then has no replica for a moment.
        replicas = fleet.control_plane.live.status()["replicas"].values()
        reports = [replica.get("report") or {} for replica in replicas]
        return [(each.get("running"), each.get("waiting")) for each in reports] == [(running, waiting)]

    body = {"model": "m", "messages": PARIS, "max_tokens": 5}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 5
    stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert [choice["finish_reason"] for choice in events(stream)[-1]["choices"]] == ["length"]
    too_long = await client.post("/v1/completions", json={"model": "m", "prompt": "word " * 600})
    assert too_long.status_code == 400
    assert too_long.json()["error"]["message"].startswith("This model's maximum context length is 512 tokens")
    async with open_streams(client, ["Hi"] * (MAX_NUM_SEQS + 2)):
        await until(lambda: load_is(MAX_NUM_SEQS, 2), timeout_s=30.0)
    await until(lambda: load_is(0, 0), timeout_s=30.0)
