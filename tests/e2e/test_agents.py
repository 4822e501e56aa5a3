"""Agents that use the official SDKs of both APIs, and what operators see of their programs."""

import asyncio
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.served import Served

pytestmark = pytest.mark.timeout(300)

TURNS = 4
# Longer than the blocks by which a prompt is recognised.
OPENING = "You edit a repository. " * 60


async def chat(client: openai.AsyncOpenAI, name: str, headers: dict[str, str]) -> None:
    """Hold a conversation through OpenAI's API, streamed."""
    messages: list[Any] = [{"role": "system", "content": f"{name}: {OPENING}"}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Step {turn} of {name}. " * 40})
        stream = await client.chat.completions.create(
            model="demo", messages=messages, max_tokens=8, stream=True, extra_headers=headers
        )
        pieces = [event.choices[0].delta.content or "" async for event in stream if event.choices]
        messages.append({"role": "assistant", "content": "".join(pieces)})


async def messages(client: anthropic.AsyncAnthropic, name: str) -> None:
    """Hold a conversation through Anthropic's API, as Claude Code names its session."""
    history: list[Any] = []
    for turn in range(TURNS):
        history.append({"role": "user", "content": f"Step {turn} of {name}. " * 40})
        answer = await client.messages.create(
            model="demo",
            system=f"{name}: {OPENING}",
            messages=history,
            max_tokens=8,
            metadata={"user_id": f"user_1_account_2_session_{name}"},
        )
        history.append({"role": "assistant", "content": answer.content[0].text})  # type: ignore[union-attr]


async def test_programs_of_both_sdks_are_recognised_and_shown(app: Served) -> None:
    chats = openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0)
    claude = anthropic.AsyncAnthropic(base_url=app.url, api_key="none", max_retries=0)
    turns_before = app.metric("ewsjf_program_turns_total")
    await asyncio.gather(
        chat(chats, "stated", {"x-session-id": "e2e-agent"}),
        chat(chats, "unstated", {}),
        messages(claude, "e2e-claude"),
    )
    async with httpx.AsyncClient(base_url=app.url, headers=app.application.admin_headers()) as http:
        programs = (await http.get("/debug/queue")).json()["models"][0]["programs"]
    rows = {row["program"]: row for row in programs["rows"]}
    assert rows["e2e-agent"]["turns"] == rows["e2e-claude"]["turns"] == TURNS
    for name in ("e2e-agent", "e2e-claude"):
        assert rows[name]["state"] == "in a gap"
        assert rows[name]["saved_tokens"] > 0
        assert len(rows[name]["replicas"]) == 1
    # The first turn of a conversation without an id is like any other request.
    recognised = [
        row for name, row in rows.items() if not name.startswith("e2e-") and row["turns"] == TURNS - 1
    ]
    assert len(recognised) == 1
    assert app.metric("ewsjf_program_turns_total") - turns_before >= 3 * TURNS - 1
