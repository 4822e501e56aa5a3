"""Real vLLM engine on the CPU, in this process; the last test kills it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from serve_app.core.dispatch.promotion import EnginePriorities, EnginePrioritySettings
from serve_app.engines.emulated.engine import EmulatedEngineSettings
from serve_app.engines.engine import EngineLoad
from serve_app.engines.vllm.engine import VllmEngineSettings
from serve_app.errors import EngineError, SettingsError
from serve_app.request import PriorityClass, Request
from serve_app.serving.gateway.answer.assembly import AnswerAssembly
from serve_app.serving.gateway.request.body import append_fields, priority_field
from tests.builders import request
from tests.engines.servers import served, until
from tests.engines.vllm.clients import CHECKS, WITH_TOOLS, client_harness
from tests.engines.vllm.clients.plain_http import small_questions
from tests.engines.vllm.conformance import (
    ANSWERED,
    ASSEMBLED,
    BEYOND_VLLM,
    added,
    answer,
    choice_form,
    without_ids,
)
from tests.engines.vllm.real import (
    ANSWER_TIMEOUT_S,
    ARGS,
    COMPACT_JSON,
    ENV,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    TINY,
    Running,
    engine_core,
    events,
    hangs,
    has_measured_tpot,
    open_streams,
    preemptions,
    running,
    runs,
    unshared_prompt,
)
from tests.engines.vllm.serving_stack import ClientView, ServingStack, serving_stack

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

# Two sequences of full length fill the tiny engine's cache.
KV_BLOCKS, BLOCK_TOKENS = 9, 128
# Its iterations take milliseconds on an idle machine.
HANG_TIMEOUT_S = 8.0
JSON = {"content-type": "application/json"}
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def tiny() -> AsyncIterator[Running]:
    own = {"num_gpu_blocks_override": KV_BLOCKS, "scheduling_policy": "priority"}
    args = {**ARGS, **COMPACT_JSON, **own}
    env = {**ENV, "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    async with running(TINY, args=args, env=env, hang_timeout_s=HANG_TIMEOUT_S) as started:
        yield started


@pytest.mark.asyncio(loop_scope="class")
class TestTinyEngine:
    async def test_its_limits_are_those_of_the_engine(self, tiny: Running) -> None:
        assert (tiny.limits.max_model_len, tiny.limits.max_num_seqs) == (MAX_MODEL_LEN, MAX_NUM_SEQS)
        # vLLM reserves one block.
        assert tiny.limits.kv_tokens == (KV_BLOCKS - 1) * BLOCK_TOKENS

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
    async def test_a_prompt_that_is_too_long_is_rejected_before_any_stream(
        self, tiny: Running, path: str, body: dict[str, Any], stream: bool
    ) -> None:
        answer = await tiny.post(path, **body, stream=stream)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (400, 400, "BadRequestError")
        assert error["param"] == "input_tokens"
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, your")

    async def test_a_very_long_prompt_is_rejected_by_its_characters(self, tiny: Running) -> None:
        answer = await tiny.post("/v1/completions", prompt="word " * 100_000)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input_text")
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, your")

    async def test_an_answer_that_would_not_fit_is_cut_short_without_a_word(self, tiny: Running) -> None:
        # Hence no engine rejects a request as too long when only its answer is.
        answer = await tiny.post(
            "/v1/completions", prompt="word " * 400, max_tokens=MAX_MODEL_LEN, ignore_eos=True
        )
        usage = answer.json()["usage"]
        assert answer.status_code == 200
        assert usage["total_tokens"] == MAX_MODEL_LEN
        assert answer.json()["choices"][0]["finish_reason"] == "length"

    async def test_the_load_has_running_and_waiting_requests(self, tiny: Running) -> None:
        async with open_streams(tiny.client, ["Hi"] * (MAX_NUM_SEQS + 2)):

            async def is_full() -> bool:
                load = await tiny.engine.load()
                return (load.running, load.waiting) == (MAX_NUM_SEQS, 2)

            await until(is_full)
            await until(lambda: has_measured_tpot(tiny.engine))
            load = await tiny.engine.load()
            assert load.tpot_s is not None
            assert 0.0005 < load.tpot_s < 2.0
            assert 0 < load.kv_usage_ratio <= 1
            text = (await tiny.client.get("/metrics")).text
            assert f'vllm:num_requests_running{{engine="0",model_name="m"}} {load.running}.0' in text
        await until(tiny.is_idle)

    async def test_a_client_that_leaves_frees_its_place_within_a_second(self, tiny: Running) -> None:
        async with open_streams(tiny.client, ["Hi"]):
            await until(lambda: runs(tiny, 1))
        await until(tiny.is_idle, timeout_s=1.0)
        assert await tiny.engine.load() == EngineLoad(
            waiting=0, running=0, kv_usage_ratio=0.0, tpot_s=(await tiny.engine.load()).tpot_s
        )

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (
                {"max_modle_len": 1},
                r"args\.max_modle_len is not an argument of vLLM 0\.\d+.*did you mean max_model_len",
            ),
            ({"max_model_len": "many"}, "--max-model-len: "),
            ({"dtype": "float33"}, "--dtype: invalid choice: 'float33'"),
            ({"scheduling_policy": "lifo"}, "--scheduling-policy: invalid choice"),
            ({"enforce_eager": "yes"}, r"args\.enforce_eager must be true or false"),
            ({"compilation_config": "{"}, "--compilation-config"),
        ],
    )
    async def test_the_parser_of_vllm_rejects_wrong_arguments(
        self, args: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(SettingsError, match=message):
            VllmEngineSettings(model="m", args=args).check()

    async def test_the_parser_of_vllm_accepts_our_configurations(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        # An empty cache: no arguments were accepted before.
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
        VllmEngineSettings(model="m", args=args).check()

    async def test_answers_of_the_emulated_engine_have_vllms_form(self, tiny: Running) -> None:
        async with served(EmulatedEngineSettings(served_model_names=("m",))) as emulated:
            for path, parameters in ANSWERED:
                real = await answer(tiny.client, path, parameters)
                ours = await answer(emulated.http, path, parameters)
                assert real.status_code == 200, (parameters, real.text)
                assert choice_form(ours) == choice_form(real), parameters

    async def test_fields_that_only_the_emulated_engine_has_are_named(self, tiny: Running) -> None:
        async with served(EmulatedEngineSettings(served_model_names=("m",))) as emulated:
            for path, names in BEYOND_VLLM.items():
                real = await answer(tiny.client, path, {})
                ours = await answer(emulated.http, path, {})
                assert real.status_code == ours.status_code == 200, (real.text, ours.text)
                assert set(added(ours.json(), real.json())) == names, path

    @pytest.mark.parametrize(("client", "feature"), [cell for cell in CHECKS if cell[1] not in WITH_TOOLS])
    async def test_a_client_supports_what_the_documentation_states(
        self, tiny: Running, client: str, feature: str
    ) -> None:
        async with client_harness(str(tiny.client.base_url)) as at:
            await CHECKS[client, feature](at)

    async def test_small_questions_are_answered_through_the_gateway(self, tiny: Running) -> None:
        async with client_harness(str(tiny.client.base_url)) as at:
            await small_questions(at)

    async def test_an_answer_assembled_from_a_stream_equals_the_whole_one(self, tiny: Running) -> None:
        for path, parameters in ASSEMBLED:
            wanted = {"temperature": 0.0, **parameters}
            # The first answer fills the prefix cache, which the usage of the second reports.
            await answer(tiny.client, path, wanted)
            whole = await answer(tiny.client, path, wanted)
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            streamed = await answer(tiny.client, path, {**wanted, **usage})
            assembly = AnswerAssembly()
            assembly.feed(streamed.content)
            assert without_ids(json.loads(assembly.whole())) == without_ids(whole.json()), parameters

    async def test_an_urgent_request_overtakes_a_backlog_inside_the_engine(self, tiny: Running) -> None:
        """Bodies and priorities come from the gateway, which replaces each client's `priority`."""
        priorities = EnginePriorities(EnginePrioritySettings(enabled=True))
        ended: list[str] = []

        async def send(request: Request, max_tokens: int) -> None:
            own = {"model": "m", "prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True, "priority": -9}
            priority = priorities.on_dispatch(request)
            assert priority is not None
            body = append_fields(json.dumps(own).encode(), [priority_field(priority)])
            answer = await tiny.client.post("/v1/completions", content=body, headers=JSON)
            assert answer.status_code == 200, answer.text
            ended.append(request.request_id)

        async def backlog_waits() -> bool:
            load = await tiny.engine.load()
            return (load.running, load.waiting) == (MAX_NUM_SEQS, 12 - MAX_NUM_SEQS)

        batch = [request(f"a{n}", tenant="a", priority=PriorityClass.BATCH) for n in range(12)]
        # Four of them fill the KV cache, so none is preempted.
        tasks = [asyncio.create_task(send(one, 250)) for one in batch]
        await until(backlog_waits)
        # From last to first in order: a batch request of a new tenant, and an interactive one.
        tasks.append(asyncio.create_task(send(request("b0", tenant="b", priority=PriorityClass.BATCH), 5)))
        await asyncio.sleep(0.05)
        tasks.append(
            asyncio.create_task(send(request("c0", tenant="c", priority=PriorityClass.INTERACTIVE), 5))
        )
        await asyncio.gather(*tasks)
        # Only running requests ended before, no queued ones. In order of arrival it would be 12 and 13.
        assert ended.index("c0") <= MAX_NUM_SEQS
        assert ended.index("b0") <= MAX_NUM_SEQS + 1

    async def test_responses_are_stored_under_the_names_that_the_gateway_assigns(self, tiny: Running) -> None:
        path, body = "/v1/responses", {"model": "m", "input": "Hi", "max_output_tokens": 8}
        async with serving_stack(tiny.engine, tiny.limits) as stack:
            first = (await stack.http.post(path, json=body)).json()
            assert re.fullmatch("resp_[0-9a-f]{40}", first["id"])
            again = (await stack.http.get(f"{path}/{first['id']}")).json()
            assert (again["id"], again["output"]) == (first["id"], first["output"])
            then = await stack.http.post(path, json={**body, "previous_response_id": first["id"]})
            assert then.json()["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 8, then.text
            long = {**body, "max_output_tokens": 400, "ignore_eos": True, "background": True}
            queued = (await stack.http.post(path, json=long)).json()
            assert queued["status"] == "queued"
            assert stack.control_plane.live.status()["replicas"]["r"]["in_flight"] == 1
            ended = await stack.http.post(f"{path}/{queued['id']}/cancel")
            assert ended.json()["status"] == "cancelled", ended.text
            await until(lambda: is_free(stack))
            queued = (await stack.http.post(path, json={**long, "max_output_tokens": 20})).json()
            await until(lambda: is_free(stack))
            found = (await stack.http.get(f"{path}/{queued['id']}")).json()
            assert (found["status"], found["usage"]["output_tokens"]) == ("incomplete", 20)
            streamed = await stack.http.post(path, json={**body, "background": True, "stream": True})
            events_before = typed_events(streamed)
            response_id = events_before[0]["response"]["id"]
            replayed = await stack.http.get(f"{path}/{response_id}?stream=true&starting_after=1")
            assert typed_events(replayed) == events_before[2:]

    async def test_a_full_kv_cache_costs_time_and_nothing_else(self, tiny: Running) -> None:
        """Sequences are preempted and computed again, which clients must not notice."""
        before = await preemptions(tiny)

        async def begun() -> bool:
            return (await tiny.engine.load()).running > 0

        async def preempted() -> bool:
            return await preemptions(tiny) > before

        # Two blocks each, and soon a third: three sequences are too many.
        prompts = [unshared_prompt(number, 2 * BLOCK_TOKENS - 16) for number in range(14)]
        lengths = range(20, 32)
        async with serving_stack(tiny.engine, tiny.limits) as stack:
            answers = [
                stack.start(stream=bool(length % 2), tokens=length, prompt=prompt)
                for length, prompt in zip(lengths, prompts[2:], strict=True)
            ]
            await until(begun, ANSWER_TIMEOUT_S)
            # These streams bypass the scheduler, which would not fill the cache, and have priority: ours are
            # preempted.
            async with open_streams(tiny.client, prompts[:2], priority=-1):
                await until(preempted, ANSWER_TIMEOUT_S)
            assert [await one for one in answers] == [ClientView("answered", length) for length in lengths]

    async def test_a_hanging_engine_gets_nothing_more_and_continues_where_it_was(self, tiny: Running) -> None:
        # The replica leaves while its engine hangs and then returns: requests that arrive in between wait for
        # it.
        async with serving_stack(tiny.engine, tiny.limits, no_replica_grace_s=60.0) as stack:
            # More tokens than are computed before the engine is stopped.
            tasks = [stack.start(stream=bool(n % 2), tokens=496 + n) for n in range(2)]
            await until(lambda: runs(tiny, 2))
            core = engine_core()
            core.suspend()
            try:
                await until(lambda: hangs(tiny.engine), timeout_s=60.0)
                # Ray replaces the replica after three such checks.
                with pytest.raises(EngineError, match="hangs: it has 2 requests"):
                    await stack.replica.check_health()
                # The scheduler learns of it from the next report.
                await until(stack.has_no_replica)
                tasks.append(stack.start(stream=True, tokens=5))
                await until(stack.waits)
            finally:
                core.resume()
            views = [await each for each in tasks]
        assert views == [ClientView("answered", tokens) for tokens in (496, 497, 5)]

    async def test_a_dead_engine_is_unhealthy_and_every_client_gets_an_error(self, tiny: Running) -> None:
        """The engine is dead afterwards, so this is its last test."""
        body = {"prompt": "Hi", "max_tokens": 500, "ignore_eos": True}
        async with serving_stack(tiny.engine, tiny.limits) as stack:
            pending = asyncio.create_task(tiny.post("/v1/completions", **body))
            begun, whole = (stack.start(stream=stream, tokens=500) for stream in (True, False))
            await until(lambda: runs(tiny, 3))
            engine_core().kill()
            assert (await asyncio.wait_for(pending, 30)).status_code == 500
            views = await asyncio.wait_for(begun, 30)
            # It had begun, or it was dispatched again like the other one.
            assert views.end in ("error event", "no_replica")
            assert await asyncio.wait_for(whole, 30) == ClientView("no_replica")
            assert await asyncio.wait_for(stack.ask(stream=True, tokens=5), 30) == ClientView("no_replica")
        with pytest.raises(EngineError, match="is dead"):
            await tiny.engine.check_health()
        with pytest.raises(EngineError, match="is dead"):
            await tiny.engine.load()
        assert (await tiny.post("/v1/completions", **body)).status_code == 500


def typed_events(answer: httpx.Response) -> list[Any]:
    """Return the data of a Responses API stream, which has no end mark."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


async def is_free(stack: ServingStack) -> bool:
    return bool(stack.control_plane.live.status()["replicas"]["r"]["in_flight"] == 0)
