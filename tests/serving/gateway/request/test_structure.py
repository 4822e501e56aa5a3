"""Limits on the structure of bodies: whatever is cheap to parse is accepted at any size."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.request import body as structure
from serve_app.serving.gateway.request.body import MAX_CONTAINERS, MAX_ELEMENTS, check_structure


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
def test_a_body_of_too_many_things_is_rejected(sent: bytes, what: str) -> None:
    with pytest.raises(RequestRejected, match=what) as rejected:
        check_structure(sent)
    assert rejected.value.status == 400


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
def test_the_contents_of_a_text_do_not_count(text: str) -> None:
    check_structure(chat(text))


def test_the_token_ids_of_a_long_prompt_pass() -> None:
    check_structure(json.dumps({"model": "m", "prompt": list(range(1_000_000))}).encode())


def test_the_definitions_of_many_tools_pass() -> None:
    properties = {f"field_{number}": {"type": "string", "enum": ["a", "b"]} for number in range(10)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    check_structure(json.dumps({"model": "m", "messages": [], "tools": [tool] * 1_000}).encode())


# No backslash at the end: the quote after it would count as escaped.
texts = st.text(alphabet='[]{},":\\ \u00e9\u6570a', max_size=12).filter(lambda text: not text.endswith("\\"))
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Return the strings, containers and commas between elements in a value."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    found = [counts(one) for one in inner]
    strings, containers, commas = (sum(each[place] for each in found) for place in range(3))
    return strings, containers + 1, commas + max(0, len(value) - 1)


@given(values, st.sampled_from([2, 3, 5]), st.booleans(), st.sampled_from([None, 1]))
def test_a_body_is_rejected_exactly_when_it_has_too_many_things(
    value: Any, limit: int, ascii_only: bool, indent: int | None
) -> None:
    sent = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    strings, containers, commas = counts(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(structure, "UNCHECKED_BYTES", 0)
        patched.setattr(structure, "_COUNTED_BYTES", 7)
        for name in ("MAX_STRINGS", "MAX_CONTAINERS", "MAX_ELEMENTS"):
            patched.setattr(structure, name, limit)
        if max(strings, containers, commas) > limit:
            with pytest.raises(RequestRejected, match="the body has more than"):
                check_structure(sent)
        else:
            check_structure(sent)
