"""Fields spliced into a body's bytes: equivalent to adding them to the parsed body."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.request.body import append_fields, priority_field, usage_field

values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.text(max_size=6), values, max_size=4).map(lambda body: {"model": "m", **body})
options = st.none() | st.dictionaries(
    st.sampled_from(["include_usage", "continuous_usage_stats", "other"]), st.booleans(), max_size=3
)
spaces = st.text(alphabet=" \t\r\n", max_size=4)


@given(bodies, options, st.booleans(), spaces, st.sampled_from([None, 2]))
def test_a_splice_equals_a_merge_of_the_parsed_bodies(
    body: dict[str, Any], given_options: dict[str, bool] | None, named: bool, space: str, indent: int | None
) -> None:
    if named:
        body = {**body, "stream_options": given_options}
    written = (json.dumps(body, indent=indent) + space).encode()
    has_options = bool(named and given_options is not None)
    field = usage_field(written, has_stream_options=has_options)
    spliced = json.loads(append_fields(written, [field, priority_field(2)]))
    merged_options = {**(given_options or {} if named else {}), "include_usage": True}
    merged_options.pop("continuous_usage_stats", None)
    assert spliced == {**body, "stream_options": merged_options, "priority": 2}


def test_nothing_to_add_leaves_the_very_same_bytes() -> None:
    body = b'{"model": "m" }  '
    assert append_fields(body, []) is body


def test_the_clients_bytes_reach_the_engine_as_they_are() -> None:
    body = b'{ "model" : "m",\n "text":"\\u00e9\xc3\xa9" }\n'
    assert (
        append_fields(body, [priority_field(0)])
        == b'{ "model" : "m",\n "text":"\\u00e9\xc3\xa9" ,"priority":0}'
    )


@given(bodies, st.none() | st.integers(-9, 9), spaces)
def test_a_priority_replaces_the_clients_own(body: dict[str, Any], own: int | None, space: str) -> None:
    written = (json.dumps({"priority": own, **body}) + space).encode()
    assert json.loads(append_fields(written, [priority_field(2_000_001)])) == {**body, "priority": 2_000_001}
    assert append_fields(written, []) is written


@pytest.mark.parametrize("body", [b"", b"  ", b"[1]"])
def test_bodies_that_are_not_objects_are_rejected(body: bytes) -> None:
    with pytest.raises(RequestRejected, match="one JSON object"):
        append_fields(body, [priority_field(0)])


def test_continuous_usage_that_was_switched_off_stays_off() -> None:
    body = b'{"stream_options":{"continuous_usage_stats":true,"other":[1]}}'
    field = json.loads(b"{" + usage_field(body, has_stream_options=True) + b"}")
    assert field == {"stream_options": {"other": [1], "include_usage": True}}
