"""Limits on the structure of bodies: what costs a parser little passes, whatever its size."""

import json

import pytest

from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.request.structure import MAX_CONTAINERS, MAX_ELEMENTS, check_structure


def body(content: str) -> bytes:
    return b'{"model":"m","messages":[' + content.encode() + b"]}"


def chat(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (body(",".join(["{}"] * MAX_CONTAINERS)), "objects and arrays"),
        (body("[" * 2 * MAX_CONTAINERS), "objects and arrays"),
        (body(",".join(['"\\\\"'] * 600_000)), "strings"),
        (body(",".join(["1"] * (MAX_ELEMENTS + 2))), "elements"),
        (body(chat('\\"')[:-1].decode() + "," + ",".join(["[]"] * MAX_CONTAINERS)), "objects and arrays"),
    ],
    ids=["objects", "nested", "strings", "elements", "after-escapes"],
)
def test_a_body_of_too_many_things_is_refused(sent: bytes, what: str) -> None:
    with pytest.raises(RequestRefused, match=what) as refused:
        check_structure(sent)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "text",
    [
        "[{," * 1_000_000,
        '"{' * 500_000,
        "\\" * 1_000_001 + "{" * MAX_CONTAINERS + '\\"[' * MAX_CONTAINERS,
        "a long text, with commas, " * 100_000,
    ],
    ids=["brackets", "quotes", "backslashes", "prose"],
)
def test_what_stands_in_a_text_does_not_count(text: str) -> None:
    check_structure(chat(text))


def test_the_token_ids_of_a_long_prompt_pass() -> None:
    check_structure(json.dumps({"model": "m", "prompt": list(range(1_000_000))}).encode())


def test_the_definitions_of_many_tools_pass() -> None:
    properties = {f"field_{number}": {"type": "string", "enum": ["a", "b"]} for number in range(10)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    check_structure(json.dumps({"model": "m", "messages": [], "tools": [tool] * 1_000}).encode())
