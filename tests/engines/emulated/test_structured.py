"""Structured outputs of the emulated engine: valid JSON, patterns and choices."""

import json
import re
from typing import Any, Literal

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import BaseModel, Field

from tests.engines.servers import Served

ASK: list[Any] = [{"role": "user", "content": "A recipe, please."}]


class Step(BaseModel):
    text: str = Field(min_length=3)
    minutes: int = Field(ge=1, le=90)
    then: "Step | None" = None


class Recipe(BaseModel):
    name: str
    kind: Literal["soup", "cake"]
    price: float = Field(gt=0, lt=20)
    steps: list[Step] = Field(min_length=1, max_length=3)
    tags: dict[str, bool]


SCHEMA = Recipe.model_json_schema()


async def test_the_sdk_parses_the_answer_into_a_pydantic_model(engine: Served) -> None:
    answer = await engine.sdk.chat.completions.parse(model="tiny", messages=ASK, response_format=Recipe)
    recipe = answer.choices[0].message.parsed
    assert isinstance(recipe, Recipe)
    assert answer.choices[0].finish_reason == "stop"


async def test_responses_parse_into_a_pydantic_model_too(engine: Served) -> None:
    answer = await engine.sdk.responses.parse(model="tiny", input="A recipe", text_format=Recipe)
    assert isinstance(answer.output_parsed, Recipe)


async def test_a_response_with_two_formats_is_rejected(engine: Served) -> None:
    two = {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"choice": ["a"]}}
    answer = await engine.http.post("/v1/responses", json={"model": "tiny", "input": "x", **two})
    assert answer.status_code == 400
    assert "both structured_outputs and text.format" in answer.json()["error"]["message"]


async def test_a_stream_adds_up_to_the_same_json_and_the_same_count(engine: Served) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": ASK,
        "response_format": {"type": "json_schema", "json_schema": {"name": "recipe", "schema": SCHEMA}},
    }
    whole = await engine.sdk.chat.completions.create(**request)
    stream = await engine.sdk.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    Recipe.model_validate_json(text)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 5


async def test_json_mode_answers_with_an_object(engine: Served) -> None:
    for path, ask in (("chat/completions", {"messages": ASK}), ("completions", {"prompt": "x"})):
        body = {**ask, "response_format": {"type": "json_object"}, "max_tokens": 500}
        (choice,) = (await engine.http.post(f"/v1/{path}", json=body)).json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert isinstance(json.loads(text), dict)
    body = {"input": "x", "text": {"format": {"type": "json_object"}}}
    answer = (await engine.http.post("/v1/responses", json=body)).json()
    assert isinstance(json.loads(answer["output"][0]["content"][0]["text"]), dict)


@pytest.mark.parametrize(
    ("path", "ask"), [("chat/completions", {"messages": ASK}), ("completions", {"prompt": "x"})]
)
async def test_structured_outputs_take_json_a_regex_or_choices(
    engine: Served, path: str, ask: dict[str, Any]
) -> None:
    async def text(constraint: dict[str, Any]) -> str:
        body = {**ask, "max_tokens": 800, "structured_outputs": constraint}
        answer = await engine.http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    jsonschema.validate(json.loads(await text({"json": SCHEMA})), SCHEMA)
    jsonschema.validate(json.loads(await text({"json": json.dumps(SCHEMA)})), SCHEMA)
    assert re.fullmatch(r"\d{3}-[a-f]+!", await text({"regex": r"\d{3}-[a-f]+!"}))
    assert await text({"choice": ["yes", "no"]}) in {"yes", "no"}
    assert isinstance(json.loads(await text({"json_object": True})), dict)


async def test_json_that_max_tokens_cuts_ends_with_length(engine: Served) -> None:
    answer = await engine.sdk.chat.completions.create(
        model="tiny",
        messages=ASK,
        max_tokens=5,
        response_format={"type": "json_schema", "json_schema": {"name": "recipe", "schema": SCHEMA}},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert (answer.choices[0].message.content or "").startswith('{"name"')


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            {"response_format": {"type": "json_schema"}},
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
        ),
        ({"response_format": {"type": "yaml"}}, "validation error"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "validation error"),
        ({"structured_outputs": {}}, "You must use one kind of structured outputs constraint"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "only use one kind of constraints"),
        ({"structured_outputs": {"json": {}, "json_object": True}}, "You can only use one kind of struct"),
        ({"structured_outputs": {"choice": []}}, "Choice '[]' cannot be an empty list"),
        ({"structured_outputs": {"json": " "}}, "structured_outputs.json cannot be an empty string"),
        ({"structured_outputs": {"json": "{"}}, "Invalid JSON grammar specification."),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object must be True"),
        ({"structured_outputs": {"regex": "(a"}}, "Failed to transform regex into a grammar"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "grammar is not supported by the emulated"),
        ({"structured_outputs": {"json": {"type": "text"}}}, "Failed to transform json schema into a gr"),
        (
            {"structured_outputs": {"json": {"type": "integer", "minimum": 3, "maximum": 2}}},
            "Failed to transform json schema into a grammar",
        ),
        ({"structured_outputs": {"json": {"$ref": "http://127.0.0.1/x"}}}, "http://127.0.0.1/x"),
        ({"structured_outputs": {"json": False}}, "validation error"),
    ],
)
async def test_a_constraint_that_cannot_be_met_is_rejected(
    engine: Served, body: dict[str, Any], words: str
) -> None:
    answer = await engine.http.post("/v1/chat/completions", json={"messages": ASK, **body})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
