"""Answers that one vLLM engine begins and another one continues, against uninterrupted ones."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import ANY

import pytest
import pytest_asyncio

from serve_app.core.commands import Revoke
from serve_app.core.events import DispatchFailed
from serve_app.serving.gateway.answer.assembly import ContinuableAssembly
from serve_app.serving.gateway.request.body import AS_STREAM, append_fields
from tests.engines.servers import until
from tests.engines.vllm.real import ARGS, QUICK_START, SMOLLM2, Running, running
from tests.engines.vllm.serving_stack import ServingStack, serving_stack

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT = 40
# The last one is continued with characters of several tokens.
PROMPTS = [
    "Once upon a time, there was a cat who",
    "1 < 2, 2 < 3, 3 < 4,",
    "Ω ≈ 你好 🌍 Ω ≈ 你好 🌍 Ω ≈ 你好 🌍 Ω",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Running]:
    async with running(SMOLLM2, args=ARGS, env=QUICK_START) as started:
        yield started


def body_of(path: str, prompt: str, **changes: Any) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    return {"model": "m", "temperature": 0, "max_tokens": LIMIT, **content, **changes}


async def attempt(
    started: Running, path: str, asked: bytes, assembly: ContinuableAssembly
) -> AsyncIterator[int]:
    """Feed an assembly with an answer; yield the number of events so far."""
    body = append_fields(asked, [AS_STREAM, *assembly.begin_attempt()])
    number = 0
    headers = {"content-type": "application/json"}
    async with started.client.stream("POST", path, content=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            assembly.feed(line.encode() + b"\n")
            if line:
                number += 1
                yield number


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_a_continued_answer_is_the_uninterrupted_one(engine: Running, path: str, prompt: str) -> None:
    asked = json.dumps(body_of(path, prompt)).encode()
    whole, ids, events = await interrupted(engine, path, asked, [])
    plain = (await engine.client.post(path, json=body_of(path, prompt))).json()
    assert text_of(whole) == text_of(plain)
    assert whole["usage"] == counts_of(plain)
    for stops in ([2], [9, 4], [20, 9, 6], [events - 3]):
        assert await interrupted(engine, path, asked, stops) == (whole, ids, ANY)


async def interrupted(
    started: Running, path: str, asked: bytes, stops: list[int]
) -> tuple[dict[str, Any], list[int], int]:
    """Return an answer without its own fields, its ids, and the events of its last part.

    Args:
        stops: number of events after which each attempt is stopped.
    """
    assembly = ContinuableAssembly(LIMIT, is_chat=path == CHAT)
    number = 0
    for stop in [*stops, 0]:
        if not assembly.kept_tokens:
            assembly = ContinuableAssembly(LIMIT, is_chat=path == CHAT)
        async for number in attempt(started, path, asked, assembly):
            if number == stop:
                break
    answer = json.loads(assembly.whole())
    counts = {"usage": counts_of(answer)}
    return {"choices": answer["choices"], "model": answer["model"], **counts}, assembly._output, number


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_revoked_request_is_continued_behind_the_gateway(engine: Running, path: str) -> None:
    body = body_of(path, PROMPTS[0], max_tokens=100, ignore_eos=True)
    async with serving_stack(engine.engine, engine.limits) as stack:
        plain = (await stack.http.post(path, json=body)).json()
        batch = {"x-priority": "batch"}
        request = asyncio.create_task(stack.http.post(path, json=body, headers=batch))
        tokens = [await revoked(stack) for _ in range(2)]
        answer = (await request).json()
    assert 0 < tokens[0] < tokens[1] < 100
    assert text_of(answer) == text_of(plain)
    assert counts_of(answer) == counts_of(plain)
    assert "token_ids" not in json.dumps(answer)


async def revoked(stack: ServingStack) -> int:
    """Revoke the running request after some tokens; return the number with which it continues."""
    live, events = stack.control_plane.live, list[DispatchFailed]()
    requests = live.core.requests.values()
    await until(lambda: is_true(any(scheduled.started for scheduled in requests)), 60.0)
    await asyncio.sleep(0.4)
    (scheduled,) = requests
    request_id, replica_id = scheduled.request.request_id, scheduled.replica_id
    handle = live.core.handle

    def noted(event: Any, now: float) -> Any:
        if isinstance(event, DispatchFailed):
            events.append(event)
        return handle(event, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.core, "handle", noted)
        assert replica_id is not None
        live._gateways.revoke(Revoke(request_id=request_id, gateway_id="g1", replica_id=replica_id))
        await until(lambda: is_true(bool(events)))
    return events[0].generated_tokens


async def is_true(value: bool) -> bool:
    return value


def counts_of(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: count for name, count in answer["usage"].items() if isinstance(count, int)}


def text_of(answer: dict[str, Any]) -> Any:
    (choice,) = answer["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]
