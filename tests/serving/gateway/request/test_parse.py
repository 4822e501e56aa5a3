"""Parsed bodies of every endpoint, and the messages about invalid ones."""

import json
from typing import Any

import pytest

from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.request.endpoints import SCHEDULED, ParsedBody, parse_model
from serve_app.serving.gateway.request.fields import UsageOnRequestFields

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"


def parse(path: str, **fields: Any) -> ParsedBody:
    return SCHEDULED[path].parse(json.dumps({"model": "m", **fields}).encode())


def test_tools_and_schemas_are_measured_as_received_json() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    parsed = parse(
        CHAT,
        messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": call}],
        tools=tools,
        response_format=None,
    )
    assert parsed.spec.shape.tool_bytes == len(json.dumps(tools)) + len(json.dumps(call))
    assert parsed.spec.shape.text_bytes == 1


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, None), ({"max_tokens": 5}, 5), ({"max_tokens": 5, "max_completion_tokens": 9}, 9)],
)
def test_the_output_limit_of_a_chat(fields: dict[str, int], limit: int | None) -> None:
    assert parse(CHAT, messages=[], **fields).spec.max_output_tokens == limit


@pytest.mark.parametrize(
    ("fields", "limit"), [({}, 16), ({"max_tokens": None}, None), ({"max_tokens": 3}, 3)]
)
def test_a_completion_without_a_limit_gets_openais_default(fields: dict[str, Any], limit: int | None) -> None:
    assert parse(COMPLETIONS, prompt="x", **fields).spec.max_output_tokens == limit


@pytest.mark.parametrize(
    ("prompt", "text_bytes", "tokens", "prompts"),
    [
        ("abc", 3, None, 1),
        (["abc", "de"], 5, None, 2),
        ([1, 2, 3], 0, 3, 1),
        ([[1, 2, 3], [4]], 0, 4, 2),
        (["abc", [1, 2]], 3, None, 2),
        ([], 0, None, 1),
    ],
)
def test_prompts_as_text_or_token_ids(prompt: Any, text_bytes: int, tokens: int | None, prompts: int) -> None:
    for path, name in ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input")):
        parsed = parse(path, **{name: prompt})
        assert parsed.spec.shape.text_bytes == text_bytes
        assert parsed.spec.shape.prompt_tokens == tokens
        assert parsed.spec.shape.prompts == prompts
        assert parsed.spec.choices == prompts


def test_choices_count_sequences_over_all_prompts() -> None:
    assert parse(COMPLETIONS, prompt=["a", "b"], n=3).spec.choices == 6
    assert parse(CHAT, messages=[], n=4).spec.choices == 4


def test_embeddings_generate_nothing() -> None:
    parsed = parse(EMBEDDINGS, input="abc")
    assert parsed.spec.max_output_tokens == 0
    assert not parsed.spec.streamed
    assert parse(EMBEDDINGS, messages=[{"role": "user", "content": "abcd"}]).spec.shape.text_bytes == 4


def test_responses_take_a_text_or_items_and_instructions() -> None:
    assert parse(RESPONSES, input="abc", instructions="de").spec.shape.text_bytes == 5
    parsed = parse(
        RESPONSES,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "abc"}, {"type": "input_image"}]},
            {"type": "function_call", "name": "f", "call_id": "1", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "1", "output": "done"},
            {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "x"}},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "item_reference", "id": "x"},
        ],
        max_output_tokens=7,
        stream=True,
    )
    assert parsed.spec.shape.text_bytes == 3 + 4 + 2
    assert parsed.spec.shape.tool_bytes == 7
    assert parsed.spec.shape.media_items == 2
    assert parsed.spec.shape.messages == 6
    assert parsed.spec.max_output_tokens == 7
    assert parsed.spec.streamed


@pytest.mark.parametrize(
    ("options", "requested"),
    [(None, False), ({}, False), ({"continuous_usage_stats": False}, False), ({"include_usage": True}, True)],
)
def test_stream_options_decide_whether_the_client_sees_the_usage(options: object, requested: bool) -> None:
    fields = parse(CHAT, messages=[], stream=True, stream_options=options).fields
    assert isinstance(fields, UsageOnRequestFields)
    assert fields.usage_requested is requested


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (CHAT, {"messages": []}),
        (COMPLETIONS, {"prompt": "x"}),
        (RESPONSES, {"input": "x"}),
        (EMBEDDINGS, {"input": "x"}),
    ],
)
def test_vllms_priority_is_read_at_every_endpoint(path: str, prompt: dict[str, Any]) -> None:
    assert parse(path, **prompt).fields.priority is None
    assert parse(path, **prompt, priority=-(2**63)).fields.priority == -(2**63)
    with pytest.raises(RequestRejected, match="priority is invalid"):
        parse(path, **prompt, priority="high")


def test_the_end_user_is_found_under_either_name() -> None:
    assert parse(CHAT, messages=[], user="u").fields.end_user == "u"
    assert parse(CHAT, messages=[], user="u", safety_identifier="s").fields.end_user == "s"


def test_of_a_key_given_twice_the_last_counts_as_in_the_engine() -> None:
    body = b'{"model":"a","max_tokens":1,"messages":[],"model":"b","max\\u005ftokens":9}'
    parsed = SCHEDULED[CHAT].parse(body)
    assert (parsed.spec.model, parsed.spec.max_output_tokens) == ("b", 9)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, b'{"messages":[]}', "model", "model is missing: add it"),
        (CHAT, b'{"model":"m"}', "messages", "messages is missing"),
        (COMPLETIONS, b'{"model":"m"}', "prompt", "prompt is missing"),
        (EMBEDDINGS, b'{"model":"m"}', "input", "input is missing"),
        (RESPONSES, b'{"model":"m"}', "input", "input is missing"),
        (RESPONSES, b'{"model":"m","input":"x","background":5}', "background", "expected `bool | null`"),
        (
            CHAT,
            b'{"model":"m","messages":[],"max_tokens":"many"}',
            "max_tokens",
            "expected `int | null`, got `str`",
        ),
        (CHAT, b'{"model":"m","messages":[],"max_tokens":-1}', "max_tokens", ">= 0"),
        (CHAT, b'{"model":"m","messages":[],"n":0}', "n", ">= 1"),
        (CHAT, b'{"model":"m","messages":[],"n":99999999999999999999999}', "n", "<= 1000000"),
        (CHAT, b'{"model":"m","messages":[{"content":5}]}', "messages[0].content", "got `int`"),
        (CHAT, b'{"model":7,"messages":[]}', "model", "expected `str`"),
        (CHAT, b'{"model":"m","messages":[],"stream":"yes"}', "stream", "expected `bool | null`"),
        (CHAT, b"[]", None, "send one JSON object"),
        (CHAT, b"", None, "not valid JSON"),
        (CHAT, b'{"model":"m"', None, "not valid JSON"),
        (CHAT, b'{"model":"\xff","messages":[]}', None, "not UTF-8"),
        (CHAT, b'{"model":"m","messages":[],"x":' + b"[" * 100_000, None, "nested too deeply"),
    ],
)
def test_a_bad_body_is_rejected_by_field_and_remedy(
    path: str, body: bytes, param: str | None, words: str
) -> None:
    with pytest.raises(RequestRejected) as caught:
        SCHEDULED[path].parse(body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert words in caught.value.message


def test_the_model_alone_can_be_read() -> None:
    assert parse_model(b'{"prompt": 5, "model": "m"}') == "m"
    with pytest.raises(RequestRejected, match="model is missing"):
        parse_model(b"{}")


def test_values_that_vllm_coerces_are_taken() -> None:
    spec = parse(CHAT, messages=[], max_tokens=5.0, n="2", stream="true").spec
    assert (spec.max_output_tokens, spec.choices, spec.streamed) == (5, 2, True)
    with pytest.raises(RequestRejected, match="max_tokens"):
        parse(CHAT, messages=[], max_tokens=5.5)


def test_a_prompt_that_begins_with_a_stored_response_has_no_known_beginning() -> None:
    text = "word " * 400
    alone = parse(RESPONSES, input=text, cache_salt="s").prompt
    goes_on = parse(RESPONSES, input=text, cache_salt="s", previous_response_id="resp_1").prompt
    assert alone.prefix_hashes(model="m")
    assert not goes_on.prefix_hashes(model="m")
    assert goes_on.salt == "s"
