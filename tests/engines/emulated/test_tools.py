"""Tool calls of the emulated engine: demanded ones are made, without arguments."""

from typing import Any

import pytest

from tests.engines.servers import Served

QUESTION: list[Any] = [{"role": "user", "content": "Will I need an umbrella?"}]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(("choice", "name"), [("required", "clock"), (NAMED, "get_weather")])
async def test_a_demanded_call_is_made_whole_and_as_a_stream(engine: Served, choice: Any, name: str) -> None:
    request: Any = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": [CLOCK, WEATHER],
        "tool_choice": choice,
        "max_tokens": 20,
    }
    whole = await engine.sdk.chat.completions.create(**request)
    async with engine.sdk.chat.completions.stream(**request) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == (name, "{}")
        assert answer.choices[0].finish_reason == "tool_calls"
        assert not answer.choices[0].message.content


@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_an_answer_that_need_not_call_a_tool_is_text(engine: Served, choice: Any) -> None:
    answer = await engine.sdk.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[WEATHER], tool_choice=choice, max_tokens=20
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


async def test_responses_call_the_function_too_whole_and_as_a_stream(engine: Served) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": {}, "strict": True}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        request: Any = {"model": "tiny", "input": "Umbrella?", "tools": [tool], "tool_choice": choice}
        whole = await engine.sdk.responses.create(**request)
        (item,) = whole.output
        assert item.type == "function_call"
        assert (item.name, item.arguments, item.status) == ("get_weather", "{}", "completed")
        stream = await engine.sdk.responses.create(**request, stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[2:] == [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
