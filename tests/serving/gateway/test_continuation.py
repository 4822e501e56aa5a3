"""Revoked answers that an emulated engine continues, over HTTP."""

import asyncio
import json
from typing import Any

import pytest

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from serve_app.serving.gateway import ServedModel
from tests.serving.channel.harness import wait_until

from .builders import MODEL, FakeDispatcher, chat, emulated
from .conftest import running_gateway
from .test_assembly import CHAT, COMPLETIONS, without_ids_and_times

# More than a second of work, so that the revocation is in time on a busy machine.
TOKENS = 300


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_revoked_answer_is_that_of_an_uninterrupted_request(path: str, streamed: bool) -> None:
    document = chat() if path == CHAT else {"model": MODEL, "prompt": "Once upon a time"}
    document |= {"max_tokens": TOKENS, "ignore_eos": True, "stream": streamed}
    whole, _ = await answer(path, document, revokes=False)
    revoked, dispatcher = await answer(path, document, revokes=True)
    assert revoked == whole
    assert dispatcher.put_backs() == [DispatchFailure.REVOKED]
    assert 0 < dispatcher.generated_tokens[0] < TOKENS
    assert dispatcher.outcomes() == [Outcome.COMPLETED]
    assert dispatcher.events[-1][2].output_tokens == TOKENS


async def answer(path: str, document: Any, *, revokes: bool) -> tuple[Any, FakeDispatcher]:
    """Return the answer of a new engine, and the calls of the scheduler."""
    dispatcher = FakeDispatcher([], names_responses=True)
    models = (ServedModel(name=MODEL, resume_streams=True, max_model_len=4096),)
    async with (
        emulated(profile="laptop") as engine,
        running_gateway(dispatcher, engine=engine.app, models=models) as harness,
    ):
        headers = {"x-priority": "batch", "x-ewsjf-receipt": "1"}
        request = asyncio.create_task(harness.http.post(path, json=document, headers=headers))
        if revokes:
            await wait_until(lambda: "first_token" in dispatcher.names())
            await asyncio.sleep(0.05)
            assert dispatcher.revoke is not None
            dispatcher.revoke()
        response = await request
        page = (await harness.http.get("/metrics")).text
    assert ('ewsjf_gateway_put_backs_total{failure="revoked"' in page) is revokes
    if not document["stream"]:
        return without_ids_and_times(response.json()), dispatcher
    *events, done, receipt = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert done == "[DONE]"
    # A first token by an earlier grant is no stage of the last one.
    stages = json.loads(receipt.removeprefix(": ewsjf-receipt "))["stages_ms"]
    assert ("engine" in stages, "until_first_token" in stages) == (revokes, not revokes)
    return without_ids_and_times([json.loads(event) for event in events]), dispatcher
