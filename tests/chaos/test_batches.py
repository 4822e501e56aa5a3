"""Batches while their application dies in parts: each line of the input has one line of output."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import openai
import psutil
import pytest

from serve_app.serving.gateway.batches.store import OPEN
from tests.e2e.served import Served

pytestmark = [pytest.mark.application, pytest.mark.timeout(1_200)]

CHATS = "/v1/chat/completions"
VICTIMS = ("gateway", "scheduler", "short", "gateway")


def input_line(number: int) -> bytes:
    """Return a request whose answer has a length of its own."""
    messages = [{"role": "user", "content": f"Line {number}."}]
    body = {"model": "demo", "messages": messages, "max_tokens": tokens_of(number), "ignore_eos": True}
    request = {"custom_id": f"line-{number}", "method": "POST", "url": CHATS, "body": body}
    return json.dumps(request).encode() + b"\n"


def tokens_of(number: int) -> int:
    """Return the length of an answer, by which it is recognised."""
    return 5 + number % 97


def kill(app: Served, deployment: str) -> None:
    """Kill a process of a deployment, if one runs now."""
    victims: list[psutil.Process] = app.replicas(deployment)
    for victim in victims[:1]:
        victim.send_signal(signal.SIGKILL)


async def retry_while_down(call: Any) -> Any:
    """Repeat a call of the client while its gateway is dead."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return await call()
        except (openai.APIConnectionError, openai.InternalServerError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


async def killed_batch(app: Served, requests: int, kills: int) -> None:
    """Serve a batch under kills, and compare its output with its input."""
    client = openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=30)
    contents = b"".join(map(input_line, range(requests)))
    file = await retry_while_down(lambda: client.files.create(file=("in.jsonl", contents), purpose="batch"))
    options: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"}
    batch = await retry_while_down(lambda: client.batches.create(**options))
    victims: Iterator[str] = cycle(VICTIMS)
    done, struck = 0, 0
    while batch.status in OPEN:
        await asyncio.sleep(0.25)
        batch = await retry_while_down(partial(client.batches.retrieve, batch.id))
        assert batch.request_counts is not None
        # A kill each time that a further part of the batch has ended.
        if struck < kills and batch.request_counts.completed > done:
            await asyncio.to_thread(kill, app, next(victims))
            struck += 1
            done += requests // (kills + 2)
    assert struck == kills
    assert batch.status == "completed"
    written = await retry_while_down(lambda: client.files.content(batch.output_file_id))
    found = [json.loads(line) for line in written.text.splitlines()]
    assert [each["custom_id"] for each in found] == [f"line-{number}" for number in range(requests)]
    for number, each in enumerate(found):
        assert each["response"]["body"]["usage"]["completion_tokens"] == tokens_of(number)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (requests, 0)
    assert batch.error_file_id is None
    await client.close()


async def test_a_batch_survives_the_deaths_of_its_application(app: Served) -> None:
    await killed_batch(app, 1_200, 4)


@pytest.mark.slow
async def test_a_long_batch_survives_twenty_deaths(app: Served) -> None:
    await killed_batch(app, 5_000, 20)
