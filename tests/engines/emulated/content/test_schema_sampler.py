"""The sampler of JSON schemas, judged by `jsonschema`."""

import json
import random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engines.emulated.content.schema_merge import SchemaError
from serve_app.engines.emulated.content.schema_sampler import sample

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
DEPENDENT = {
    "type": "object",
    "properties": {"card": {"type": "string"}, "address": {"type": "string", "minLength": 1}},
    "required": ["card"],
    "dependentRequired": {"card": ["address"]},
}
CONDITIONAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}},
    "required": ["kind"],
    "if": {"properties": {"kind": {"const": "a"}}},
    "then": {"required": ["x"], "properties": {"x": {"type": "integer"}}},
    "else": {"required": ["y"]},
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
    "conditional": CONDITIONAL,
    "dependent": DEPENDENT,
    "free names": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 2},
    "names of a pattern": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 2,
    },
    "names with a rule": {"type": "object", "propertyNames": {"pattern": "^[A-Z]{3}$"}, "minProperties": 1},
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
    "unique": {"type": "array", "items": {"enum": [1, 2, 3, 4]}, "uniqueItems": True, "minItems": 4},
    "contains": {
        "type": "array",
        "items": {"type": "integer"},
        "contains": {"minimum": 50},
        "minContains": 2,
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
            "regex",
        )
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_value_is_accepted_by_its_schema(name: str) -> None:
    schema = SCHEMAS[name]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    judge = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for seed in range(25):
        value = sample(schema, random.Random(seed))
        judge.validate(value)
        assert json.loads(json.dumps(value)) == value


def test_equal_seeds_give_equal_values_and_others_differ() -> None:
    values = [json.dumps(sample(LINKED, random.Random(seed))) for seed in (1, 1, 2)]
    assert values[0] == values[1] != values[2]


def test_properties_keep_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}, "m": {}}, "required": ["a", "m", "z"]}
    assert list(sample(schema, random.Random(0))) == ["z", "a", "m"]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 2}, "exclude every number"),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "exclude every number"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3 is above maxLength 2"),
        ({"type": "string", "minLength": 10**9}, "minLength is 1000000000"),
        ({"type": "string", "pattern": "(a"}, "'regex'"),
        ({"type": "string", "pattern": "a{999999}"}, "longer than"),
        ({"type": "array", "minItems": 10**12}, "minItems is 1000000000000"),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 3}, "too few"),
        ({"type": "object", "minProperties": 10**7}, "minProperties is"),
        ({"$ref": "#"}, "circle"),
        ({"$ref": "http://127.0.0.1:9/x"}, "not a path within the schema"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "contradict each other"),
        ({"type": "text"}, "'text' is not valid"),
        ({"not": {}}, "no value was found"),
        (False, "allows no value"),
        (
            {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
            "nest deeper than",
        ),
        (
            {"type": "array", "minItems": 200, "items": {"type": "array", "minItems": 200}},
            "more than 10000 parts",
        ),
    ],
)
def test_a_schema_that_nothing_meets_is_refused_with_the_reason(schema: Any, why: str) -> None:
    with pytest.raises(SchemaError, match=why):
        sample(schema, random.Random(0))


def schemas() -> st.SearchStrategy[Any]:
    """Schemas that contradict themselves now and then."""
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
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_any_schema_gives_a_value_that_it_accepts_or_is_refused(schema: Any, seed: int) -> None:
    try:
        value = sample(schema, random.Random(seed))
    except SchemaError:
        return
    jsonschema.Draft202012Validator(schema).validate(value)
