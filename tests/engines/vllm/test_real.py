"""A real vLLM engine on the CPU: in this process, and as a server of its own that is an endpoint.

One engine takes about 4 GB, so each fixture starts one for its class and ends it before the next one starts.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.engine import Engine, EngineLimits, EngineLoad
from serve_app.engines.vllm.engine import VllmEngine, VllmEngineSettings, check_vllm_args
from serve_app.errors import EngineError, SettingsError
from serve_app.request import PriorityClass, Request
from serve_app.scheduling.dispatch.engine_priority import EnginePriorities, EnginePrioritySettings
from serve_app.serving.gateway.request.splice import with_priority
from tests.builders import request
from tests.engines.servers import free_port, served, serving, until
from tests.engines.vllm.conformance import ANSWERED, REFUSED, answer, choice_form
from tests.serving.endpoints.servers import WatchedFleet, watched

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

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
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
JSON = {"content-type": "application/json"}
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Running:
    """An engine that serves, and a client of it."""

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
        async with serving(engine.app) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
            yield Running(engine, limits, client)
    finally:
        await engine.stop()


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def tiny() -> AsyncIterator[Running]:
    async with running(TINY) as started:
        yield started


@contextlib.asynccontextmanager
async def open_streams(client: httpx.AsyncClient, count: int) -> AsyncIterator[None]:
    """Keep so many streams open, some of which wait for their first token; all are cut at the end."""

    async def read() -> None:
        body = {"model": "m", "prompt": "Hi", "max_tokens": 500, "stream": True, "ignore_eos": True}
        while True:  # a quick machine ends a stream before its load was looked at
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    pass

    reading = [asyncio.create_task(read()) for _ in range(count)]
    try:
        yield
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def knows_its_tpot(engine: Engine) -> bool:
    """It has seen gaps between tokens, which takes two readings of a server's metrics."""
    return (await engine.load()).tpot_s is not None


def engine_processes() -> list[psutil.Process]:
    """The children that vLLM has started; multiprocessing's own helper may stay."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def events(answer: httpx.Response) -> list[Any]:
    """The data of a stream; its end mark is checked and left out."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.asyncio(loop_scope="class")
class TestTinyEngine:
    async def test_its_limits_are_those_of_the_engine(self, tiny: Running) -> None:
        assert (tiny.limits.max_model_len, tiny.limits.max_num_seqs) == (MAX_MODEL_LEN, MAX_NUM_SEQS)
        # 1 GiB at 2 layers, 2 heads of 64 and float32, less one block of 128.
        assert tiny.limits.kv_tokens == 2**30 // (2 * 2 * 2 * 64 * 4) - 128

    async def test_a_stream_ends_with_its_usage_and_a_mark(self, tiny: Running) -> None:
        answer = await tiny.post(
            "/v1/chat/completions",
            messages=PARIS,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = events(answer)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 5
        assert all("usage" not in chunk for chunk in chunks[:-1])

    async def test_usage_contains_the_tokens_of_the_prefix_cache(self, tiny: Running) -> None:
        # vLLM caches whole blocks, of 128 tokens on a CPU.
        prompt = "many words " * 100
        first = await tiny.post("/v1/completions", prompt=prompt, max_tokens=1)
        again = await tiny.post("/v1/completions", prompt=prompt, max_tokens=1)
        assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 128

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 600}]}),
            ("/v1/completions", {"prompt": "word " * 600}),
            ("/v1/completions", {"prompt": [5] * 600}),
            ("/v1/responses", {"input": "word " * 600}),
        ],
    )
    async def test_a_prompt_that_is_too_long_is_refused_before_any_stream(
        self, tiny: Running, path: str, body: dict[str, Any], stream: bool
    ) -> None:
        answer = await tiny.post(path, **body, stream=stream)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
        assert error["param"] == "input_tokens"
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, your")

    async def test_a_very_long_prompt_is_refused_by_its_characters(self, tiny: Running) -> None:
        answer = await tiny.post("/v1/completions", prompt="word " * 100_000)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input_text")
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, your")

    async def test_an_answer_that_would_not_fit_is_cut_short_without_a_word(self, tiny: Running) -> None:
        # So no engine says that a request belongs elsewhere when only its answer is too long.
        answer = await tiny.post(
            "/v1/completions", prompt="word " * 400, max_tokens=MAX_MODEL_LEN, ignore_eos=True
        )
        usage = answer.json()["usage"]
        assert answer.status_code == 200
        assert usage["total_tokens"] == MAX_MODEL_LEN
        assert answer.json()["choices"][0]["finish_reason"] == "length"

    async def test_a_priority_is_taken_though_the_engine_ignores_it(self, tiny: Running) -> None:
        answer = await tiny.post("/v1/completions", prompt="Hi", max_tokens=1, priority=5)
        assert answer.status_code == 200

    async def test_the_load_shows_what_runs_and_what_waits(self, tiny: Running) -> None:
        async with open_streams(tiny.client, MAX_NUM_SEQS + 2):

            async def is_full() -> bool:
                load = await tiny.engine.load()
                return (load.running, load.waiting) == (MAX_NUM_SEQS, 2)

            await until(is_full)
            await until(lambda: knows_its_tpot(tiny.engine))
            load = await tiny.engine.load()
            assert load.tpot_s is not None
            assert 0.0005 < load.tpot_s < 2.0
            assert 0 < load.kv_usage_ratio < 0.1
            text = (await tiny.client.get("/metrics")).text
            assert f'vllm:num_requests_running{{engine="0",model_name="m"}} {load.running}.0' in text
        await until(tiny.is_idle)

    async def test_a_client_that_leaves_frees_its_place_within_a_second(self, tiny: Running) -> None:
        async with open_streams(tiny.client, 1):

            async def runs() -> bool:
                return (await tiny.engine.load()).running == 1

            await until(runs)
        await until(tiny.is_idle, timeout_s=1.0)
        assert await tiny.engine.load() == EngineLoad(
            waiting=0, running=0, kv_usage_ratio=0.0, tpot_s=(await tiny.engine.load()).tpot_s
        )

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (
                {"max_modle_len": 1},
                r"args\.max_modle_len is no argument of vLLM 0\.\d+.*did you mean max_model_len",
            ),
            ({"max_model_len": "many"}, "--max-model-len: "),
            ({"dtype": "float33"}, "--dtype: invalid choice: 'float33'"),
            ({"scheduling_policy": "lifo"}, "--scheduling-policy: invalid choice"),
            ({"enforce_eager": "yes"}, r"args\.enforce_eager must be true or false"),
            ({"compilation_config": "{"}, "--compilation-config"),
        ],
    )
    async def test_the_parser_of_vllm_refuses_wrong_arguments(
        self, args: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(SettingsError, match=message):
            check_vllm_args(VllmEngineSettings(model="m", args=args))

    async def test_the_parser_of_vllm_takes_what_our_configurations_use(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        # An empty cache: nothing was accepted before.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        args = {
            **ARGS,
            "gpu_memory_utilization": 0.4,
            "long_prefill_token_threshold": 2048,
            "scheduling_policy": "priority",
            "max_num_batched_tokens": 2048,
            "tensor_parallel_size": 2,
            "enable_prefix_caching": False,
            "compilation_config": {"mode": 0},
            "allowed_media_domains": ["a.example", "b.example"],
        }
        check_vllm_args(VllmEngineSettings(model="m", args=args))

    async def test_the_emulated_engine_refuses_what_vllm_refuses_in_its_words(self, tiny: Running) -> None:
        async with served(EmulatedEngineSettings(served_model_names=("m",))) as emulated:
            for path, parameters in REFUSED:
                real = await answer(tiny.client, path, parameters)
                ours = await answer(emulated.http, path, parameters)
                assert real.status_code == 400, (parameters, real.text)
                assert ours.json() == real.json(), parameters

    async def test_answers_of_the_emulated_engine_have_vllms_form(self, tiny: Running) -> None:
        async with served(EmulatedEngineSettings(served_model_names=("m",))) as emulated:
            for path, parameters in ANSWERED:
                real = await answer(tiny.client, path, parameters)
                ours = await answer(emulated.http, path, parameters)
                assert real.status_code == 200, (parameters, real.text)
                assert choice_form(ours) == choice_form(real), parameters

    async def test_a_dead_engine_is_unhealthy_and_its_requests_fail(self, tiny: Running) -> None:
        """The last test of this engine, which does not outlive it."""
        body = {"prompt": "Hi", "max_tokens": 500, "ignore_eos": True}
        pending = asyncio.create_task(tiny.post("/v1/completions", **body))

        async def runs() -> bool:
            return (await tiny.engine.load()).running == 1

        await until(runs)
        for process in engine_processes():
            if "EngineCore" in " ".join(process.cmdline()):
                process.kill()
        assert (await asyncio.wait_for(pending, 30)).status_code == 500
        with pytest.raises(EngineError, match="is dead"):
            await tiny.engine.check_health()
        with pytest.raises(EngineError, match="is dead"):
            await tiny.engine.load()
        assert (await tiny.post("/v1/completions", **body)).status_code == 500


async def test_an_urgent_request_overtakes_a_backlog_inside_an_engine_that_schedules_by_priority() -> None:
    """Bodies and priorities are the gateway's, which replaces the `priority` of each client."""
    priorities = EnginePriorities(EnginePrioritySettings(enabled=True))
    ended: list[str] = []
    async with running(TINY, args={**ARGS, "scheduling_policy": "priority"}) as engine:

        async def ask(request: Request, max_tokens: int) -> None:
            own = {"model": "m", "prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True, "priority": -9}
            body = with_priority(json.dumps(own).encode(), priorities.on_dispatch(request))
            answer = await engine.client.post("/v1/completions", content=body, headers=JSON)
            assert answer.status_code == 200, answer.text
            ended.append(request.request_id)

        async def backlog_waits() -> bool:
            load = await engine.engine.load()
            return (load.running, load.waiting) == (MAX_NUM_SEQS, 12 - MAX_NUM_SEQS)

        batch = [request(f"a{n}", tenant="a", priority=PriorityClass.BATCH) for n in range(12)]
        asked = [asyncio.create_task(ask(one, 480)) for one in batch]
        await until(backlog_waits)
        # From the last to the first in order: a batch request of a new tenant, and an interactive one.
        asked.append(asyncio.create_task(ask(request("b0", tenant="b", priority=PriorityClass.BATCH), 5)))
        await asyncio.sleep(0.05)
        asked.append(
            asyncio.create_task(ask(request("c0", tenant="c", priority=PriorityClass.INTERACTIVE), 5))
        )
        await asyncio.gather(*asked)
    # Only running requests ended before; no waiting one did. In order of arrival it would be 12 and 13.
    assert ended.index("c0") <= MAX_NUM_SEQS
    assert ended.index("b0") <= MAX_NUM_SEQS + 1


async def test_smollm2_knows_the_capital_of_france_and_leaves_no_process() -> None:
    async with running(SMOLLM2) as started:
        question = {"messages": PARIS, "max_tokens": 12, "temperature": 0}
        answer = await started.post("/v1/chat/completions", **question)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        stream = await started.post("/v1/chat/completions", **question, stream=True)
        said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(stream))
        assert "Paris" in said
        processes = engine_processes()
        assert len(processes) >= 2
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []
    with pytest.raises(EngineError, match=r"call start\(\) first"):
        await started.engine.check_health()


async def test_an_engine_whose_core_cannot_start_raises_and_leaves_no_process() -> None:
    # One block of the KV cache holds no sequence of 512 tokens, which only the core finds out.
    args = {**ARGS, "num_gpu_blocks_override": 1}
    engine = VllmEngine(VllmEngineSettings(model=str(TINY), args=args, env=ENV))
    with pytest.raises(EngineError, match=r"vLLM could not start .*its own log lines above have the cause"):
        await engine.start()
    _, alive = psutil.wait_procs(engine_processes(), timeout=10)
    assert alive == []


@contextlib.contextmanager
def vllm_server() -> Iterator[str]:
    """A vLLM server, started on the command line; yields its base URL before it listens."""
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
            (found,) = fleet.watcher.described()
            assert (found["max_model_len"], found["models"]) == (MAX_MODEL_LEN, ["m"])
            assert int(str(found["kv_tokens"])) > MAX_MODEL_LEN
            await _use(fleet)


async def _use(fleet: WatchedFleet) -> None:
    client = fleet.http

    async def load_is(running: int, waiting: int) -> bool:
        (replica,) = fleet.world.live.status()["replicas"].values()
        report = replica.get("report") or {}
        return (report.get("running"), report.get("waiting")) == (running, waiting)

    body = {"model": "m", "messages": PARIS, "max_tokens": 5}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 5
    stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert [choice["finish_reason"] for choice in events(stream)[-1]["choices"]] == ["length"]
    too_long = await client.post("/v1/completions", json={"model": "m", "prompt": "word " * 600})
    assert too_long.status_code == 400
    assert too_long.json()["error"]["message"].startswith("This model's maximum context length is 512 tokens")
    async with open_streams(client, MAX_NUM_SEQS + 2):
        await until(lambda: load_is(MAX_NUM_SEQS, 2))
    await until(lambda: load_is(0, 0), timeout_s=10.0)
