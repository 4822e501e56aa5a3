"""Constraints on the text of an answer, and how requests state them; refusals are in vLLM's words.

The samplers are imported by the first request that needs them.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from serve_app.engines.emulated.content.spec import Constraint
from serve_app.engines.emulated.errors import invalid, not_emulated, unreadable

# Objects and arrays that a schema may nest, as in vLLM.
_MAX_NESTING = 64
# Attempts at a string that a whole pattern matches.
_ATTEMPTS = 20
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class JsonConstraint:
    """A JSON document that a schema accepts."""

    schema: Any

    def text(self, rng: random.Random) -> str:
        """A document on one line."""
        from serve_app.engines.emulated.content.schema_merge import SchemaError  # noqa: PLC0415
        from serve_app.engines.emulated.content.schema_sampler import sample  # noqa: PLC0415

        try:
            return json.dumps(sample(self.schema, rng), ensure_ascii=False)
        except SchemaError as error:
            raise invalid(f"Failed to transform json schema into a grammar: {error}") from error


@dataclass(frozen=True, slots=True)
class RegexConstraint:
    """A text that a regular expression matches as a whole."""

    pattern: str

    def text(self, rng: random.Random) -> str:
        """A text."""
        from serve_app.engines.emulated.content.patterns import PatternError, matching  # noqa: PLC0415

        problem = "no text was found that it matches"
        for _ in range(_ATTEMPTS):
            try:
                text = matching(self.pattern, rng)
            except PatternError as error:
                problem = str(error)
                break
            if re.fullmatch(self.pattern, text):
                return text
        raise invalid(f"Failed to transform regex into a grammar: {problem}")


@dataclass(frozen=True, slots=True)
class ChoiceConstraint:
    """One of some texts."""

    choices: tuple[str, ...]

    def text(self, rng: random.Random) -> str:
        """A text."""
        return rng.choice(self.choices)


ANY_OBJECT = JsonConstraint({"type": "object"})


class JsonSchemaFormat(msgspec.Struct):
    """The schema of a `response_format`."""

    name: str
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format` of the completion APIs."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, omit_defaults=True):
    """`structured_outputs`, vLLM's own field."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


def is_given(raw: msgspec.Raw) -> bool:
    """Whether the field is there and not null."""
    return bool(raw) and bytes(raw) != b"null"


def read_raw(raw: msgspec.Raw, kind: Any) -> Any:
    """The field in its type; one that does not fit is refused."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise unreadable(str(error)) from error


def read_constraint(response_format: msgspec.Raw, structured_outputs: msgspec.Raw) -> Constraint | None:
    """The constraint of a request, from one of the two fields or both."""
    outputs: StructuredOutputs | None = None
    if is_given(structured_outputs):
        outputs = read_raw(structured_outputs, StructuredOutputs)
        _check_kinds(outputs)
    if is_given(response_format):
        wanted = read_raw(response_format, ResponseFormat)
        if wanted.type == "structural_tag":
            raise not_emulated("structural_tag")
        if wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise invalid(
                    "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
                    param="response_format",
                )
            outputs = _with(outputs, "json", wanted.json_schema.schema)
        elif wanted.type == "json_object":
            outputs = _with(outputs, "json_object", True)
    return None if outputs is None else _constraint(outputs)


def _with(outputs: StructuredOutputs | None, name: str, value: Any) -> StructuredOutputs:
    outputs = outputs or StructuredOutputs()
    setattr(outputs, name, value)
    _check_kinds(outputs)
    return outputs


def _check_kinds(outputs: StructuredOutputs) -> None:
    given = [name for name in _KINDS if getattr(outputs, name) is not None]
    stated = {name: getattr(outputs, name) for name in given}
    if sum(name in {"json", "regex", "choice"} for name in given) > 1:
        raise invalid(
            "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice')."
        )
    if len(given) > 1:
        raise invalid(
            f"You can only use one kind of structured outputs constraint but multiple are specified: {stated}"
        )
    if not given:
        raise invalid(
            f"You must use one kind of structured outputs constraint but none are specified: {stated}"
        )


def _constraint(outputs: StructuredOutputs) -> Constraint:
    for name in ("grammar", "structural_tag"):
        if getattr(outputs, name) is not None:
            raise not_emulated(f"structured_outputs.{name}")
    if outputs.choice is not None:
        if not outputs.choice:
            raise invalid("Choice '[]' cannot be an empty list")
        return ChoiceConstraint(tuple(outputs.choice))
    if outputs.regex is not None:
        return RegexConstraint(outputs.regex)
    if outputs.json is not None:
        return json_constraint(outputs.json)
    if outputs.json_object is False:
        raise invalid(
            "structured_outputs.json_object must be True if set; omit structured_outputs to disable "
            "structured outputs"
        )
    return ANY_OBJECT


def json_constraint(schema: str | dict[str, Any]) -> JsonConstraint:
    """The constraint of a schema that is not nested too deeply."""
    if isinstance(schema, str):
        if not schema.strip():
            raise invalid("structured_outputs.json cannot be an empty string")
        try:
            read = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid("Invalid JSON grammar specification.") from error
    else:
        read = schema
    level = [read]
    for _ in range(_MAX_NESTING):
        level = [child for node in level for child in _children(node)]
    if level:
        raise invalid(
            f"The JSON schema is nested too deeply: objects and arrays may nest at most {_MAX_NESTING} levels"
        )
    return JsonConstraint(read)


def _children(node: Any) -> Iterator[Any]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return (child for child in children if isinstance(child, (dict, list)))
