"""Stored responses of the emulated engine; gateway tests cover background work."""

import openai
import pytest
from openai.types.responses import ResponseIncompleteEvent

from tests.engines.servers import Served


async def test_a_response_can_be_retrieved_and_continued(engine: Served) -> None:
    create = engine.sdk.responses.create
    first = await create(model="tiny", input="Tell me a story.", max_output_tokens=20)
    found = await engine.sdk.responses.retrieve(first.id)
    assert (found.id, found.output_text, found.usage) == (first.id, first.output_text, first.usage)
    alone = await create(model="tiny", input="And then?", max_output_tokens=5)
    second = await create(model="tiny", input="And then?", previous_response_id=first.id, max_output_tokens=5)
    tokens = [each.usage.input_tokens for each in (first, alone, second) if each.usage]
    assert tokens[2] > tokens[0] + tokens[1]


async def test_the_client_may_name_a_response(engine: Served) -> None:
    named = await engine.sdk.responses.create(
        model="tiny", input="x", max_output_tokens=2, extra_body={"request_id": "resp_mine"}
    )
    assert named.id == "resp_mine"
    assert (await engine.sdk.responses.retrieve("resp_mine")).output_text == named.output_text


async def test_a_stream_is_stored_as_well(engine: Served) -> None:
    stream = await engine.sdk.responses.create(model="tiny", input="x", max_output_tokens=8, stream=True)
    last = [event async for event in stream][-1]
    assert isinstance(last, ResponseIncompleteEvent)
    assert (await engine.sdk.responses.retrieve(last.response.id)).output_text == last.response.output_text


async def test_an_unstored_response_is_not_found(engine: Served) -> None:
    unstored = await engine.sdk.responses.create(model="tiny", input="x", max_output_tokens=2, store=False)
    for response_id in (unstored.id, "resp_never"):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{response_id}' not found"):
            await engine.sdk.responses.retrieve(response_id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await engine.sdk.responses.create(model="tiny", input="x", previous_response_id=unstored.id)
    with pytest.raises(openai.BadRequestError, match="when `store` is true"):
        await engine.sdk.responses.create(model="tiny", input="x", background=True, store=False)
