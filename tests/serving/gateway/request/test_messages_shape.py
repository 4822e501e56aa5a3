"""Anthropic messages: sizes for the estimate, and prefix hashes."""

import json
from typing import Any

from serve_app.request import PromptShape
from serve_app.serving.gateway.request.endpoints import SCHEDULED, ParsedBody

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 9_000}}
TOOL = {"name": "read_file", "description": "reads", "input_schema": {"type": "object"}}


def parse(*messages: Any, **fields: Any) -> ParsedBody:
    body = {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    return SCHEDULED["/v1/messages"].parse(json.dumps(body).encode())


def shape(*messages: Any, **fields: Any) -> PromptShape:
    return parse(*messages, **fields).spec.shape


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_text_is_counted_wherever_it_occurs() -> None:
    thought = {"type": "thinking", "thinking": "12345", "signature": "s"}
    found = shape(
        user(text("123")), {"role": "assistant", "content": [thought, text("1234567")]}, system="12"
    )
    assert (found.text_bytes, found.messages, found.media_items) == (17, 3, 0)
    assert shape({"role": "user", "content": "123"}, system=[text("45")]).text_bytes == 5


def test_images_are_media_also_in_the_results_of_tools() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("abc"), IMAGE]}
    found = shape(user(IMAGE, text("what?")), user(result))
    assert (found.media_items, found.text_bytes, found.tool_bytes) == (2, 8, 0)


def test_tools_and_their_calls_are_counted_as_json() -> None:
    call = {"type": "tool_use", "id": "t", "name": "read_file", "input": {"path": "/tmp/x"}}
    found = shape(user(text("a")), {"role": "assistant", "content": [call]}, tools=[TOOL])
    assert found.tool_bytes == len(json.dumps([TOOL])) + len(json.dumps(call["input"]))
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert shape(user(text("a")), output_config=schema).tool_bytes == len(json.dumps(schema))


def test_the_user_is_the_one_that_the_metadata_name() -> None:
    assert parse(user(text("a")), metadata={"user_id": "u1"}).fields.end_user == "u1"


def test_turns_of_a_conversation_share_a_prefix() -> None:
    def hashes(billing: str, *messages: Any) -> tuple[int, ...]:
        system = [text(f"x-anthropic-billing-header: {billing}"), text("You are an agent. " * 90)]
        return parse(*messages, system=system, tools=[TOOL]).prompt.prefix_hashes(model="m")

    first = user(text("Read the file. " * 60))
    answer = {"role": "assistant", "content": [{"type": "tool_use", "name": "read_file", "input": {}}]}
    result = user({"type": "tool_result", "tool_use_id": "t", "content": "lines " * 200})
    before, after = hashes("1", first), hashes("2", first, answer, result)
    assert len(before) >= 2
    # The header changes with every turn, and no engine passes it to its model.
    assert after[: len(before)] == before
    assert len(after) > len(before)
    assert hashes("1", user(text("Write a file. " * 60)))[-1] != before[-1]
