"""Smallest instances of JSON schemas, validated by `jsonschema`, and shortest matches of patterns."""

import json
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engines.emulated.smallest import UnsatisfiableError, shortest_match, smallest_json

LINKED = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
TREE = {
    "type": "object",
    "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["children"],
}
SCHEMAS: dict[str, Any] = {
    "anything": {},
    "any object": {"type": "object"},
    "no properties": {"type": "object", "properties": {}, "additionalProperties": False},
    "linked list": LINKED,
    "tree": TREE,
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 6}, "b": {"const": None}}, "required": ["b"]},
        ]
    },
    "one of": {"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]},
    "not": {"type": "integer", "minimum": 1, "maximum": 3, "not": {"const": 2}},
    "free names": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 2},
    "few properties": {
        "type": "object",
        "properties": {name: {"type": "null"} for name in "abcdef"},
        "required": ["c"],
        "maxProperties": 2,
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "items": False},
    "tuple of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "string"}, {"type": "integer"}],
        "additionalItems": False,
        "minItems": 2,
    },
    "exclusive bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.001},
    "one number": {"type": "number", "minimum": 7, "maximum": 7},
    "below zero": {"type": "integer", "exclusiveMaximum": -5},
    "far away": {"type": "number", "minimum": 1e12},
    "steps": {"type": "number", "multipleOf": 0.05, "minimum": 0.1, "maximum": 0.3},
    "whole steps": {"type": "integer", "multipleOf": 2.5, "minimum": 1, "maximum": 30},
    "bounds of draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 4,
    },
    "pattern": {"type": "string", "pattern": r"^[A-Z][a-z]{2,}( \d+)?$"},
    "pattern and length": {"type": "string", "pattern": "^a+$", "minLength": 3, "maxLength": 5},
    "long string": {"type": "string", "minLength": 300, "maxLength": 301},
    "short string": {"type": "string", "maxLength": 1},
    "nullable": {"type": ["string", "null"], "format": "uuid"},
    "escaped reference": {"$defs": {"a/b": {"const": 1}}, "$ref": "#/$defs/a~1b"},
    **{
        name: {"type": "string", "format": name}
        for name in (
            "date",
            "time",
            "date-time",
            "email",
            "ipv4",
            "ipv6",
            "uuid",
            "hostname",
            "duration",
        )
    },
}


def smallest(schema: Any) -> Any:
    return json.loads(smallest_json(json.dumps(schema)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_value_is_accepted_by_its_schema(name: str) -> None:
    schema = SCHEMAS[name]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(smallest(schema))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": {"a": {"type": "string"}}}, {}),
        (LINKED, {"value": 0, "next": None}),
        (TREE, {"children": []}),
        ({"type": "array", "items": {"type": "integer", "minimum": -7}, "minItems": 2}, [0, 0]),
        ({"type": "integer", "maximum": -3}, -3),
        ({"type": "string", "minLength": 2}, "aa"),
        ({"type": ["string", "null"]}, None),
        ({"anyOf": [{"type": "array"}, {"const": 4}]}, 4),
        ({"oneOf": [{"type": "integer", "multipleOf": 3}, {"type": "integer", "multipleOf": 5}]}, 3),
    ],
)
def test_nothing_is_there_that_need_not_be(schema: Any, value: Any) -> None:
    assert smallest(schema) == value


def test_properties_have_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}, "m": {}}, "required": ["a", "m", "z"]}
    assert list(smallest(schema)) == ["z", "a", "m"]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no value was found"),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "no value was found"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no value was found"),
        ({"type": "string", "minLength": 10**9}, "longer than"),
        ({"type": "string", "pattern": "(a"}, "'regex'"),
        ({"type": "string", "pattern": "a{999999}"}, "longer than"),
        ({"type": "array", "minItems": 10**12}, "minItems is 1000000000000"),
        ({"type": "array", "uniqueItems": True, "minItems": 3}, "no value was"),
        ({"type": "object", "minProperties": 10**7}, "more than 10000 steps"),
        ({"$ref": "#"}, "circle|steps"),
        ({"$ref": "http://127.0.0.1:9/x"}, "not a path within the schema"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "contradict each other"),
        ({"type": "text"}, "'text' is not valid"),
        ({"not": {}}, "no value was found"),
        (False, "no value was found"),
        (
            {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
            "nest deeper than",
        ),
        (
            {"type": "array", "minItems": 200, "items": {"type": "array", "minItems": 200}},
            "more than 10000 steps",
        ),
    ],
)
def test_a_schema_that_nothing_meets_is_rejected_with_the_reason(schema: Any, why: str) -> None:
    with pytest.raises(UnsatisfiableError, match=why):
        smallest(schema)


def schemas() -> st.SearchStrategy[Any]:
    """Generate schemas, some of which contradict themselves."""
    small = st.integers(-5, 5)
    leaves = st.one_of(
        st.just({}),
        st.builds(lambda value: {"const": value}, small),
        st.builds(lambda low, high: {"type": "integer", "minimum": low, "maximum": high}, small, small),
        st.builds(
            lambda low, step: {"type": "number", "minimum": low, "multipleOf": step}, small, st.integers(1, 4)
        ),
        st.builds(
            lambda least, most: {"type": "string", "minLength": least, "maxLength": most},
            st.integers(0, 4),
            st.integers(0, 9),
        ),
        st.sampled_from(
            [{"type": "boolean"}, {"type": "null"}, {"type": ["null", "string"]}, {"enum": [1, "a"]}]
        ),
    )

    def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        names = st.sampled_from("abc")
        some = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            st.builds(
                lambda properties, required, free: {
                    "type": "object",
                    "properties": properties,
                    "required": required,
                    "additionalProperties": free,
                },
                st.dictionaries(names, inner, max_size=3),
                st.lists(names, unique=True, max_size=3),
                st.booleans(),
            ),
            st.builds(
                lambda items, least, extra, unique: {
                    "type": "array",
                    "items": items,
                    "minItems": least,
                    "maxItems": least + extra,
                    "uniqueItems": unique,
                },
                inner,
                st.integers(0, 3),
                st.integers(0, 3),
                st.booleans(),
            ),
            st.builds(lambda key, parts: {key: parts}, st.sampled_from(["anyOf", "oneOf", "allOf"]), some),
        )

    return st.recursive(leaves, larger, max_leaves=8)


@settings(max_examples=150, deadline=None)
@given(schema=schemas())
def test_any_schema_gives_a_value_that_it_accepts_or_is_rejected(schema: Any) -> None:
    try:
        value = smallest(schema)
    except UnsatisfiableError:
        return
    jsonschema.Draft202012Validator(schema).validate(value)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{3}-[a-f]+!",
        r"[A-Z][a-z]{2,}",
        r"(a|b)\1",
        r"(?P<x>ab?)(?P=x)",
        r'[^"\\]*',
        r"\w+@\w+\.(com|org)",
        r"(\([0-9]{3}\))?[0-9]{3}-[0-9]{4}",
        r"a*?b+?c??",
        r"[\u4e00-\u9fff]{2}",
        r"\S+\s\D\W",
        r"(?i)yes|no",
        r".{5}",
        "",
    ],
)
def test_the_shortest_match_matches(pattern: str) -> None:
    for extra in range(3):
        assert re.fullmatch(pattern, shortest_match(pattern, extra))


@pytest.mark.parametrize("pattern", ["(a", "a{30000}", "(a{300}){300}", "[z-a]", "*", "(?>ab)"])
def test_a_pattern_that_is_invalid_too_long_or_unknown_is_rejected(pattern: str) -> None:
    with pytest.raises(UnsatisfiableError):
        shortest_match(pattern)
