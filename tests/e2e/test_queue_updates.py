"""Streams with queue updates, in an overloaded application."""

import asyncio
import json
import re
from dataclasses import dataclass

import httpx
import pytest

from tests.e2e.served import Served

pytestmark = pytest.mark.timeout(300)

# Waits of seconds, because updates come at most once per second.
STREAMS, TOKENS = 120, 400
UPDATE = re.compile(r": queue state=(\w+)(?: position=(\d+))?(?: expected_start_s=([\d.e-]+))?")


@dataclass(frozen=True)
class StreamView:
    """One client's view of its stream.

    Attributes:
        positions: received positions, in order.
        after_answer: updates after the first event of the answer.
    """

    status: int
    positions: list[int]
    states: list[str]
    tokens: int
    ends: int
    after_answer: int


async def listen(http: httpx.AsyncClient, number: int) -> StreamView:
    positions: list[int] = []
    states: list[str] = []
    tokens = ends = after_answer = 0
    answer_began = False
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"{number}: tell me something."}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-ewsjf-queue": "comments", "x-tenant": "listener"}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        async for line in answer.aiter_lines():
            update = UPDATE.match(line)
            if update is not None:
                after_answer += answer_began
                states.append(update[1])
                positions += [int(update[2])] if update[2] else []
            elif line == "data: [DONE]":
                ends += 1
            elif line.startswith("data: "):
                answer_began = True
                usage = json.loads(line.removeprefix("data: ")).get("usage") or {}
                tokens += usage.get("completion_tokens", 0)
    return StreamView(answer.status_code, positions, states, tokens, ends, after_answer)


async def test_waiting_streams_get_their_position_and_all_are_served(app: Served) -> None:
    limits = httpx.Limits(max_connections=STREAMS + 10)
    before = app.metric("ewsjf_queue_estimates_total", estimate="first")
    async with httpx.AsyncClient(base_url=app.url, timeout=200, limits=limits) as http:
        views = await asyncio.gather(*(listen(http, number) for number in range(STREAMS)))
    assert {(one.status, one.tokens, one.ends, one.after_answer) for one in views} == {(200, TOKENS, 1, 0)}
    updated = [one for one in views if one.positions]
    assert len(updated) >= STREAMS / 10
    for one in updated:
        assert min(one.positions) >= 1
        assert max(one.positions) <= STREAMS
        assert one.states[-1] == "started"
        assert set(one.states) <= {"waiting", "started"}
    # The position of a single stream may rise: a shorter prompt that arrives later may go first.
    moved = [one.positions for one in updated if len(one.positions) >= 2]
    assert sum(positions[-1] for positions in moved) < sum(positions[0] for positions in moved)
    assert app.metric("ewsjf_queue_estimates_total", estimate="first") > before


async def test_a_value_that_means_nothing_is_rejected(app: Served) -> None:
    async with httpx.AsyncClient(base_url=app.url, timeout=30) as http:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
        answer = await http.post("/v1/chat/completions", json=body, headers={"x-ewsjf-queue": "loud"})
    assert answer.status_code == 400
    assert "comments or events" in answer.json()["error"]["message"]
