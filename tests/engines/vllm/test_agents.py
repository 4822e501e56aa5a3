"""Tools and reasoning of a real vLLM engine: with every client, and in coding agent conversations."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from tests.engines.vllm.clients import CHECKS, WITH_TOOLS, client_harness
from tests.engines.vllm.compared_requests import GENERATED, same_answer
from tests.engines.vllm.conversations import TURNS, converse
from tests.engines.vllm.real import ARGS, QUICK_START, TINY, Running, running
from tests.engines.vllm.serving_stack import serving_stack
from tests.engines.vllm.weights.scripted import make_scripted

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

CONVERSATIONS = 6


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def agent(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    model = make_scripted(tmp_path_factory.mktemp("scripted"), tokenizer_of=TINY)
    args = {
        **ARGS,
        "max_model_len": 8192,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_r1",
    }
    async with running(Path(model), args=args, env=QUICK_START) as started:
        yield started


@contextlib.asynccontextmanager
async def client_of(url: object) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=str(url), api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


@pytest.mark.asyncio(loop_scope="class")
class TestAgentEngine:
    @pytest.mark.parametrize(("client", "feature"), [cell for cell in CHECKS if cell[1] in WITH_TOOLS])
    async def test_a_client_supports_what_the_documentation_states(
        self, agent: Running, client: str, feature: str
    ) -> None:
        async with client_harness(str(agent.client.base_url)) as at:
            await CHECKS[client, feature](at)

    @pytest.mark.parametrize(("path", "body"), GENERATED)
    async def test_its_answers_are_forwarded_unchanged(
        self, agent: Running, path: str, body: dict[str, Any]
    ) -> None:
        async with serving_stack(agent.engine, agent.limits) as stack:
            await same_answer((stack.http, agent.client), path, body)

    async def test_conversations_at_once_are_answered_as_each_alone_by_the_engine(
        self, agent: Running
    ) -> None:
        tasks = [f"Repair module {number}, and say what it was." for number in range(CONVERSATIONS)]
        async with serving_stack(agent.engine, agent.limits) as stack, client_of(stack.http.base_url) as ours:
            through = await asyncio.gather(*(converse(ours, task) for task in tasks))
        async with client_of(agent.client.base_url) as theirs:
            straight = [await converse(theirs, task) for task in tasks]
        assert through == straight
        turns = [turn for conversation in through for turn in conversation]
        assert len(turns) == CONVERSATIONS * TURNS
        # Both ends occur, and every answer begins with reasoning.
        assert {turn.stop_reason for turn in turns} == {"tool_use", "end_turn"}
        assert {tuple(turn.block_types()) for turn in turns} == {
            ("thinking", "text"),
            ("thinking", "text", "tool_use"),
        }
        for turn in turns:
            assert (turn.events[0], turn.events[-1]) == ("message_start", "message_stop")
            assert turn.events.count("content_block_start") == len(turn.content)
            assert turn.events.count("content_block_stop") == len(turn.content)
        for conversation in through:
            lengths = [turn.prompt_tokens for turn in conversation]
            assert lengths == sorted(set(lengths))
            assert lengths[0] > 1_500
