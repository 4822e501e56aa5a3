"""Coding agent conversations: a shared long system prompt, tools, and growing turns."""

import random
import string
from dataclasses import dataclass
from typing import Any

import anthropic

from tests.engines.vllm.weights.scripted import TOOL_NAME, TOOL_SCHEMA

TURNS = 5
_FILES = "\n".join(f"- source/module_{n}.py holds part {n} of the program, and its tests." for n in range(80))
SYSTEM = f"You are a coding agent. Look things up before you change them. These are the files:\n{_FILES}"
TOOLS: Any = [
    {"name": TOOL_NAME, "description": "Look a city up.", "input_schema": TOOL_SCHEMA},
    {"name": "write", "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}}},
]


@dataclass(frozen=True)
class AgentTurn:
    """One answer of the agent's model.

    Attributes:
        content: its blocks, without IDs and signatures.
        events: event types of the stream; a run of deltas counts as one.
        prompt_tokens: all prompt tokens, cached or not.
    """

    content: list[dict[str, Any]]
    stop_reason: str | None
    events: list[str]
    prompt_tokens: int
    output_tokens: int

    def block_types(self) -> list[str]:
        return [block["type"] for block in self.content]


def unique_text(about: str) -> str:
    """Return a text that no other conversation contains."""
    words = random.Random(about)
    return f"{about}: " + " ".join("".join(words.choices(string.ascii_lowercase, k=5)) for _ in range(60))


async def converse(client: anthropic.AsyncAnthropic, task: str) -> list[AgentTurn]:
    """Return a conversation's turns: tool results are sent back, and a user replies to text."""
    messages: list[Any] = [{"role": "user", "content": unique_text(task)}]
    turns: list[AgentTurn] = []
    for number in range(TURNS):
        events: list[str] = []
        async with client.messages.stream(
            model="m",
            system=[{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
            messages=messages,
            tools=TOOLS,
            max_tokens=100,
            extra_body={"temperature": 0},
        ) as stream:
            async for event in stream:
                # The client adds its own events to those of the stream.
                if event.type.startswith(("message_", "content_block_")) and events[-1:] != [event.type]:
                    events.append(event.type)
            message = await stream.get_final_message()
        turns.append(_turn(message, events))
        messages += [{"role": "assistant", "content": message.content}, _reply(message, f"{task} {number}")]
    return turns


def _turn(message: Any, events: list[str]) -> AgentTurn:
    usage = message.usage
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    return AgentTurn(
        content=[
            block.model_dump(exclude_none=True, exclude={"id", "signature"}) for block in message.content
        ],
        stop_reason=message.stop_reason,
        events=events,
        prompt_tokens=sum(part or 0 for part in parts),
        output_tokens=usage.output_tokens,
    )


def _reply(message: Any, about: str) -> dict[str, Any]:
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": unique_text(f"{about} {block.input['city']}"),
        }
        for block in message.content
        if block.type == "tool_use"
    ]
    return {"role": "user", "content": results or unique_text(f"Go on with {about}")}
