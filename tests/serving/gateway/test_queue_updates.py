"""Queue updates in streams whose clients request them, over HTTP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import RequestOutlook
from serve_app.serving.gateway.answer.stream import SUBSCRIBE_AFTER_S
from serve_app.serving.gateway.batches.runner import CollectingExchange
from tests.serving.channel.harness import wait_until

from .builders import Answer, anthropic_stream, call, chat, error_json, rejection, replies
from .conftest import GatewayHarness, running_gateway

CHAT = "/v1/chat/completions"
COMMENTS, EVENTS = {"x-ewsjf-queue": "comments"}, {"x-ewsjf-queue": "events"}


@asynccontextmanager
async def queued(*answers: Answer, **changes: Any) -> AsyncIterator[GatewayHarness]:
    """Run a gateway whose scheduler queues every request, over an engine with these answers."""
    async with running_gateway(**changes) as harness:
        harness.engine.answers.extend(answers)
        harness.dispatcher.gate.clear()
        yield harness


async def send_update(harness: GatewayHarness, position: int, *start: float) -> None:
    """Send a queue update for the only request; times in seconds: expected, earliest, latest."""
    await wait_until(lambda: bool(harness.dispatcher.watching))
    ((request_id, on_outlook),) = harness.dispatcher.watching.items()
    expected, earliest, latest = start or (None, None, None)
    on_outlook(RequestOutlook(request_id, position, expected, earliest, latest))
    await asyncio.sleep(0.05)


async def away(harness: GatewayHarness) -> None:
    (on_outlook,) = harness.dispatcher.watching.values()
    on_outlook(None)
    await asyncio.sleep(0.05)


async def streamed(harness: GatewayHarness, headers: dict[str, str], **fields: Any) -> tuple[int, str]:
    body = chat(stream=True, max_tokens=3, **fields)
    async with harness.http.stream("POST", CHAT, json=body, headers=headers) as answer:
        return answer.status_code, "".join([piece async for piece in answer.aiter_text()])


async def test_comments_have_position_and_start_and_then_the_answer_follows() -> None:
    async with queued() as harness:
        reading = asyncio.create_task(streamed(harness, COMMENTS))
        await send_update(harness, 7)
        await send_update(harness, 3, 2.4, 1.1, 4.0)
        await away(harness)
        harness.dispatcher.gate.set()
        status, text = await reading
    assert status == 200
    comments, _, answer = text.partition("data: ")
    assert comments.split("\n\n")[:-1] == [
        ": queue state=waiting position=7",
        ": queue state=waiting position=3 expected_start_s=2.4 earliest_s=1.1 latest_s=4.0",
        ": queue state=scheduler_unavailable",
        ": queue state=started",
    ]
    assert answer.endswith("data: [DONE]\n\n")
    assert harness.dispatcher.outcomes() == [Outcome.COMPLETED]


async def test_named_events_have_the_same_content() -> None:
    async with queued() as harness:
        reading = asyncio.create_task(streamed(harness, EVENTS))
        await send_update(harness, 3, 2.4, 1.1, 4.0)
        harness.dispatcher.gate.set()
        _, text = await reading
    events = [event.splitlines() for event in text.split("\n\n") if event.startswith("event: ")]
    assert [name for name, _ in events] == ["event: ewsjf.queue"] * 2
    received = [json.loads(data.removeprefix("data: ")) for _, data in events]
    waiting = {"state": "waiting", "position": 3}
    assert received[0] == {**waiting, "expected_start_s": 2.4, "earliest_s": 1.1, "latest_s": 4.0}
    assert received[1] == {"state": "started"}


async def test_a_request_served_at_once_gets_no_updates_and_costs_the_scheduler_nothing(
    harness: GatewayHarness,
) -> None:
    status, text = await streamed(harness, COMMENTS)
    assert status == 200
    assert ": queue" not in text
    await asyncio.sleep(SUBSCRIBE_AFTER_S + 0.1)
    assert harness.dispatcher.watching == {}


async def test_a_request_rejected_at_once_gets_the_true_status(harness: GatewayHarness) -> None:
    harness.dispatcher.script.append(rejection(Outcome.REJECTED_QUEUE_FULL, "full", 2.0))
    status, text = await streamed(harness, COMMENTS)
    assert status == 429
    assert json.loads(text)["error"]["message"] == "full"


async def test_a_request_that_waits_without_updates_gets_the_true_status_as_well() -> None:
    async with queued() as harness:
        harness.dispatcher.script.append(rejection(Outcome.EXPIRED, "waited too long", 2.0))
        reading = asyncio.create_task(streamed(harness, COMMENTS))
        await wait_until(lambda: bool(harness.dispatcher.watching))
        harness.dispatcher.gate.set()
        status, _ = await reading
    assert status == 504


async def test_a_rejection_after_news_is_an_error_event() -> None:
    async with queued() as harness:
        harness.dispatcher.script.append(rejection(Outcome.EXPIRED, "waited too long", 2.0))
        reading = asyncio.create_task(streamed(harness, COMMENTS))
        await send_update(harness, 1)
        harness.dispatcher.gate.set()
        status, text = await reading
    assert status == 200
    assert json.loads(text.rpartition("data: ")[2])["error"]["code"] == "queue_timeout"


async def test_a_put_back_request_gets_updates_again() -> None:
    async with queued(replies(503, error_json("busy", 503))) as harness:
        reading = asyncio.create_task(streamed(harness, COMMENTS))
        await send_update(harness, 1)
        harness.dispatcher.gate.set()
        _, text = await reading
    assert text.count(": queue state=started\n\n") >= 1
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("headers", "stream"), [({}, False), (COMMENTS, False), ({}, True)])
async def test_only_streams_whose_clients_subscribe_get_updates(
    headers: dict[str, str], stream: bool
) -> None:
    async with queued(queue_comment_interval_s=0.1) as harness:
        pending = asyncio.create_task(harness.http.post(CHAT, json=chat(stream=stream), headers=headers))
        await wait_until(lambda: harness.dispatcher.waiting == 1)
        await asyncio.sleep(SUBSCRIBE_AFTER_S + 0.1)
        assert harness.dispatcher.watching == {}
        harness.dispatcher.gate.set()
        answer = await pending
    if stream:
        assert ": queue " not in answer.text
    else:
        assert answer.headers["x-pool"] == "short"
        assert answer.json()["choices"]


@pytest.mark.parametrize("value", ["yes", "", "comments, events"])
async def test_a_value_that_is_none_of_the_two_is_rejected(harness: GatewayHarness, value: str) -> None:
    answer = await harness.http.post(CHAT, json=chat(stream=True), headers={"x-ewsjf-queue": value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "x-ewsjf-queue"
    assert repr(value) in error["message"]
    assert "comments or events" in error["message"]
    assert harness.dispatcher.submissions == []


async def test_without_updates_the_usual_comments_are_sent_and_with_updates_only_after_silence() -> None:
    async with queued(queue_comment_interval_s=0.3) as harness:
        reading = asyncio.create_task(streamed(harness, COMMENTS))
        for position in range(9, 3, -1):
            await send_update(harness, position)
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        harness.dispatcher.gate.set()
        _, text = await reading
    spoken, _, silent = text.partition("position=4\n\n")
    assert ": queued" not in spoken
    assert silent.count(": queued\n\n") >= 1


async def test_a_client_that_disconnects_in_the_queue_is_unsubscribed() -> None:
    async with queued() as harness:
        reading = asyncio.create_task(streamed(harness, COMMENTS))
        await send_update(harness, 2)
        reading.cancel()
        await wait_until(lambda: harness.gateway.in_flight == 0)
        assert harness.dispatcher.names()[-1] == "cancelled_in_queue"
        await send_update(harness, 1)


async def test_a_client_that_does_not_read_gets_the_newest_of_what_it_missed() -> None:
    class Slow(CollectingExchange):
        """Client that reads the first piece, and no further ones until the grant."""

        @property
        def is_choked(self) -> bool:
            return bool(self.pieces) and not harness.dispatcher.gate.is_set()

    async with queued() as harness:
        body = json.dumps(chat(stream=True, max_tokens=3)).encode()
        client = Slow("/v1/chat/completions", body, [(b"x-ewsjf-queue", b"comments")])
        request = asyncio.create_task(call(harness.gateway, exchange=client))
        await wait_until(lambda: bool(harness.dispatcher.watching))
        ((request_id, on_outlook),) = harness.dispatcher.watching.items()
        for position in range(1_000, 0, -1):
            on_outlook(RequestOutlook(request_id, position, None, None, None))
        harness.dispatcher.gate.set()
        assert client.on_writable is not None
        client.on_writable()
        await request
    text = b"".join(client.pieces).decode()
    assert re.findall("position=([0-9]+)", text) == ["1000", "1"]
    assert text.endswith("data: [DONE]\n\n")


async def chunks_of(sdk: openai.AsyncOpenAI, headers: dict[str, str]) -> list[ChatCompletionChunk]:
    """Return the chunks that OpenAI's client parses from a stream."""
    stream = await sdk.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        stream=True,
        extra_headers=headers,
    )
    return [chunk async for chunk in stream]


async def test_openais_sdk_reads_a_commented_stream_without_noticing() -> None:
    async with queued() as harness:
        reading = asyncio.create_task(chunks_of(harness.sdk, COMMENTS))
        await send_update(harness, 2)
        await send_update(harness, 1, 2.4, 1.1, 4.0)
        harness.dispatcher.gate.set()
        chunks = await reading
    received = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert received == ["w0 ", "w1 ", "w2 "]


async def test_openais_sdk_takes_an_event_for_a_chunk_without_choices() -> None:
    """This is why the documentation restricts named events to clients that know them."""
    async with queued() as harness:
        reading = asyncio.create_task(chunks_of(harness.sdk, EVENTS))
        await send_update(harness, 2)
        harness.dispatcher.gate.set()
        chunks = await reading
    assert isinstance(chunks[0], ChatCompletionChunk)
    assert chunks[0].choices is None
    assert chunks[0].model_extra == {"state": "waiting", "position": 2}


async def test_anthropics_sdk_reads_a_commented_stream_without_noticing() -> None:
    async with queued(anthropic_stream) as harness:
        url = f"http://127.0.0.1:{harness.port}"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as sdk:

            async def read() -> str:
                question: Any = {"role": "user", "content": "hi"}
                asking = sdk.messages.stream(
                    model="tiny", max_tokens=8, messages=[question], extra_headers=COMMENTS
                )
                async with asking as stream:
                    return await stream.get_final_text()

            reading = asyncio.create_task(read())
            await send_update(harness, 2)
            await send_update(harness, 1, 2.4, 1.1, 4.0)
            harness.dispatcher.gate.set()
            assert await reading == "hi"
