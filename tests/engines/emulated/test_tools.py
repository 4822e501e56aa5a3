"""Tool calls of the emulated engine through OpenAI's SDK."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall

from tests.engines.servers import Served

QUESTION: list[Any] = [{"role": "user", "content": "Will I need an umbrella?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def assert_fits(arguments: str) -> None:
    read = json.loads(arguments)
    assert set(read) == {"city", "days", "unit"}
    assert len(read["city"]) >= 2
    assert 1 <= read["days"] <= 7
    assert read["unit"] in {"celsius", "fahrenheit"}


def call_of(answer: ChatCompletion) -> tuple[str, str]:
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    assert call.id.startswith("chatcmpl-tool-")
    return call.function.name, call.function.arguments


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
async def test_a_forced_call_has_arguments_that_fit_the_schema(
    engine: Served, choice: Any, reason: str
) -> None:
    answer = await engine.sdk.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[WEATHER], tool_choice=choice
    )
    name, arguments = call_of(answer)
    assert name == "get_weather"
    assert_fits(arguments)
    # As in vLLM, a named tool ends with "stop".
    assert answer.choices[0].finish_reason == reason
    assert not answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= len(arguments) / 8


async def test_a_tool_without_parameters_is_called_with_an_empty_object(engine: Served) -> None:
    answer = await engine.sdk.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[CLOCK], tool_choice="required"
    )
    assert call_of(answer) == ("clock", "{}")


async def test_a_named_tool_is_the_one_that_is_called(engine: Served) -> None:
    answer = await engine.sdk.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[CLOCK, WEATHER], tool_choice=NAMED
    )
    assert call_of(answer)[0] == "get_weather"


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
async def test_a_streamed_call_adds_up_to_the_whole_one(engine: Served, choice: Any, reason: str) -> None:
    request: Any = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER], "tool_choice": choice}
    stream = await engine.sdk.chat.completions.create(
        **request, stream=True, seed=3, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    deltas: list[ChoiceDeltaToolCall] = [
        call for item in choices if item.delta.tool_calls for call in item.delta.tool_calls
    ]
    assert len(deltas) > 3
    first = deltas[0]
    assert first.id is not None
    assert first.type == "function"
    assert first.function is not None
    assert first.function.name == "get_weather"
    assert all(call.id is None and call.index == 0 for call in deltas[1:])
    arguments = "".join((call.function and call.function.arguments) or "" for call in deltas)
    assert_fits(arguments)
    assert [item.finish_reason for item in choices if item.finish_reason] == [reason]
    whole = await engine.sdk.chat.completions.create(**request, seed=3)
    assert call_of(whole)[1] == arguments
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_the_sdks_stream_helper_collects_the_call(engine: Served) -> None:
    async with engine.sdk.chat.completions.stream(
        model="tiny", messages=QUESTION, tools=[WEATHER], tool_choice="required"
    ) as stream:
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    assert [event.name for event in done] == ["get_weather"]
    assert_fits(done[0].arguments)
    assert final.choices[0].finish_reason == "tool_calls"


async def test_auto_calls_the_tool_that_the_user_mentions_and_answers_its_result_with_text(
    engine: Served,
) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    answer = await engine.sdk.chat.completions.create(model="tiny", messages=messages, tools=[CLOCK, WEATHER])
    name, arguments = call_of(answer)
    assert name == "get_weather"
    assert_fits(arguments)
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "weather: rain"}
    messages += [answer.choices[0].message.model_dump(exclude_none=True), result]
    last = await engine.sdk.chat.completions.create(model="tiny", messages=messages, tools=[CLOCK, WEATHER])
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].message.content


@pytest.mark.parametrize("choice", ["none", "auto"])
async def test_text_answers_none_and_an_auto_that_mentions_no_tool(engine: Served, choice: Any) -> None:
    content = "weather?" if choice == "none" else "umbrella?"
    answer = await engine.sdk.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        tools=[WEATHER],
        tool_choice=choice,
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


@pytest.mark.parametrize(("choice", "calls"), [("required", 0), (NAMED, 1)])
async def test_a_call_that_max_tokens_cuts_ends_with_length(engine: Served, choice: Any, calls: int) -> None:
    answer = await engine.sdk.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[WEATHER], tool_choice=choice, max_tokens=4
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    # vLLM parses only complete lists of calls, but passes on a named tool's arguments as they are.
    assert len(answer.choices[0].message.tool_calls or []) == calls


async def test_a_stop_string_cuts_a_call_as_any_text(engine: Served) -> None:
    request: Any = {"model": "tiny", "messages": QUESTION, "tools": [WEATHER], "stop": '"days"'}
    choices: list[tuple[Any, int]] = [("required", 0), (NAMED, 1)]
    for choice, calls in choices:
        answer = await engine.sdk.chat.completions.create(**request, tool_choice=choice)
        assert answer.choices[0].finish_reason == "stop"
        found = answer.choices[0].message.tool_calls or []
        assert len(found) == calls
        assert all('"days"' not in call.function.arguments for call in found)
        stream: Any = await engine.sdk.chat.completions.create(**request, tool_choice=choice, stream=True)
        parts = [call for chunk in [each async for each in stream] for call in called(chunk)]
        assert [part.function.name for part in parts if part.function and part.function.name] == [
            "get_weather"
        ]
        arguments = "".join(part.function.arguments or "" for part in parts if part.function)
        assert arguments.startswith("{")
        assert '"days"' not in arguments


def called(chunk: Any) -> list[ChoiceDeltaToolCall]:
    return [call for choice in chunk.choices for call in choice.delta.tool_calls or ()]


async def test_a_message_whose_call_is_cut_is_text(engine: Served) -> None:
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    body = {"model": "tiny", "max_tokens": 4, "messages": QUESTION, "tools": [tool]}
    wanted = {**body, "tool_choice": {"type": "tool", "name": "get_weather"}}
    for more, reason in (
        ({}, "max_tokens"),
        ({"max_tokens": 99, "stop_sequences": ['"days"']}, "stop_sequence"),
    ):
        message = (await engine.http.post("/v1/messages", json={**wanted, **more})).json()
        assert message["stop_reason"] == reason
        assert [block["type"] for block in message["content"]] == ["text"]


async def test_responses_call_the_function_too_whole_and_as_a_stream(engine: Served) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        request: Any = {"model": "tiny", "input": "Umbrella?", "tools": [tool], "tool_choice": choice}
        whole = await engine.sdk.responses.create(**request)
        (item,) = whole.output
        assert item.type == "function_call"
        assert (item.name, item.status, whole.status) == ("get_weather", "completed", "completed")
        assert_fits(item.arguments)
        stream = await engine.sdk.responses.create(**request, stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[2] == "response.output_item.added"
        assert kinds[-3:] == [
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        text = "".join(event.delta for event in events if event.type.endswith("arguments.delta"))
        assert_fits(text)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": []}, "`tools` must not be an empty array."),
        ({"tool_choice": "required"}, "When using `tool_choice`, `tools` must be set. (parameter=tool_ch"),
        ({"tool_choice": "always", "tools": [CLOCK]}, "Invalid value for `tool_choice`: always! Only named"),
        ({"tool_choice": {"type": "function"}, "tools": [CLOCK]}, "Invalid value for `function`: `None`"),
        ({"tool_choice": {"function": {}}, "tools": [CLOCK]}, "Expected field `name` in `function`"),
        ({"tool_choice": {"function": {"name": ""}}, "tools": [CLOCK]}, "Invalid `name` in `function`: ``"),
        ({"tool_choice": NAMED, "tools": [CLOCK]}, "does not match any of the specified `tools`"),
        ({"tools": [{"type": "function"}]}, "validation error"),
        ({"tools": "clock"}, "validation error"),
        (
            {"tool_choice": NAMED, "tools": [WEATHER], "structured_outputs": {"choice": ["a"]}},
            "You can only either use constraints for structured outputs or tools, not both.",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "text"}}}],
            },
            "Failed to transform json schema into a grammar",
        ),
    ],
)
async def test_a_request_for_a_call_that_cannot_be_is_rejected(
    engine: Served, body: dict[str, Any], words: str
) -> None:
    answer = await engine.http.post("/v1/chat/completions", json={"messages": QUESTION, **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_responses_reject_a_choice_without_its_tool(engine: Served) -> None:
    for choice in ("required", {"type": "function", "name": "x"}):
        with pytest.raises(openai.BadRequestError, match=r"Tool choice '(required|function)'"):
            await engine.sdk.responses.create(model="tiny", input="x", tool_choice=choice)  # type: ignore[call-overload]
