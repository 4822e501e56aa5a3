"""Structured outputs and tool calls: constraints on the text of an answer, with vLLM's error messages.

With `tool_choice: auto` the model decides. The emulated engine calls a tool if the last message is the user's
and contains a word of the tool's name. So an agent gets a call for its question, and text for the tool's
result.
"""

import re
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import msgspec

from serve_app.engines.emulated.http import ApiError, encode, invalid, not_emulated, unreadable
from serve_app.engines.emulated.smallest import UnsatisfiableError, shortest_match, smallest_json
from serve_app.engines.emulated.text import Constraint, ToolCall

# Shorter words of a name ("get", "set", "run") occur in too many sentences.
_MIN_WORD = 4
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_ONE_KIND = "You can only use one kind of"
_NAMED_TOOL = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'


def is_given(raw: msgspec.Raw) -> bool:
    """Return whether the field is present and not null."""
    return bool(raw) and bytes(raw) != b"null"


def read_raw(raw: msgspec.Raw, kind: Any) -> Any:
    """Decode the field, or raise `ApiError` if it does not match the type."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise unreadable(str(error)) from error


# -- constraints ------------------------------------------------------------------------------------------


class JsonSchemaFormat(msgspec.Struct):
    """Schema of a `response_format`."""

    name: str
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    """Field `response_format` of the completion APIs."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """Field `structured_outputs`, an extension of vLLM."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


def read_constraint(response_format: msgspec.Raw, structured_outputs: msgspec.Raw) -> Constraint | None:
    """Return the constraint of a request from either field or both, or None."""
    outputs = read_raw(structured_outputs, StructuredOutputs) if is_given(structured_outputs) else None
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
            outputs = outputs or StructuredOutputs()
            outputs.json = wanted.json_schema.schema
        elif wanted.type == "json_object":
            outputs = outputs or StructuredOutputs()
            outputs.json_object = True
    return None if outputs is None else _constraint(outputs)


def _constraint(outputs: StructuredOutputs) -> Constraint:
    given = {name: value for name, value in msgspec.structs.asdict(outputs).items() if value is not None}
    if len(given.keys() & {"json", "regex", "choice"}) > 1:
        raise invalid(f"{_ONE_KIND} constraints for structured outputs ('json', 'regex' or 'choice').")
    if len(given) > 1:
        raise invalid(f"{_ONE_KIND} structured outputs constraint but multiple are specified: {given}")
    match given:
        case {"choice": [first, *_]}:
            return lambda: str(first)
        case {"regex": str(pattern)}:
            return partial(_matching, pattern)
        case {"json": schema}:
            return json_constraint(schema)
        case {"json_object": True}:
            return ANY_OBJECT
        case {"choice": _}:
            raise invalid("Choice '[]' cannot be an empty list")
        case {"json_object": _}:
            raise invalid(
                "structured_outputs.json_object must be True if set; omit structured_outputs to disable "
                "structured outputs"
            )
    for name in given:
        raise not_emulated(f"structured_outputs.{name}")
    raise invalid("You must use one kind of structured outputs constraint but none are specified: {}")


def json_constraint(schema: str | dict[str, Any]) -> Constraint:
    """Return the constraint of a JSON schema."""
    if isinstance(schema, dict):
        return partial(_document, encode(schema).decode())
    if not schema.strip():
        raise invalid("structured_outputs.json cannot be an empty string")
    try:
        msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("Invalid JSON grammar specification.") from error
    return partial(_document, schema)


def _document(schema: str) -> str:
    try:
        return smallest_json(schema)
    except UnsatisfiableError as error:
        raise invalid(f"Failed to transform json schema into a grammar: {error}") from error


def _matching(pattern: str) -> str:
    """Return a text that fully matches a regular expression."""
    problem = "no text was found that it matches"
    try:
        text = shortest_match(pattern)
        if re.fullmatch(pattern, text):
            return text
    except UnsatisfiableError as error:
        problem = str(error)
    raise invalid(f"Failed to transform regex into a grammar: {problem}")


ANY_OBJECT = json_constraint({"type": "object"})


# -- tools ------------------------------------------------------------------------------------------------


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None = None


class ChatTool(msgspec.Struct):
    """A tool of a chat completion."""

    function: Function
    type: Literal["function"] = "function"


def chat_call(tools: msgspec.Raw, tool_choice: msgspec.Raw, user_text: str) -> ToolCall | None:
    """Return the tool call of a chat completion, or None for text.

    Args:
        user_text: text of the last message; empty unless it is the user's.
    """
    functions: list[Function] | None = None
    if is_given(tools):
        functions = [tool.function for tool in read_raw(tools, list[ChatTool])]
        if not functions:
            raise invalid(
                "`tools` must not be an empty array. Either provide "
                "at least one tool or omit the field entirely.",
                param="tools",
            )
    choice: Any = read_raw(tool_choice, Any) if is_given(tool_choice) else None
    if choice == "none" or (choice is None and functions is None):
        return None
    if functions is None:
        raise invalid("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if isinstance(choice, dict):
        name = _name_of(choice)
        for function in functions:
            if function.name == name:
                return _call(function, is_named=True)
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise invalid(message, param="tool_choice")
    if choice not in {None, "auto", "required"}:
        raise invalid(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or '
            '"required" are supported.',
            param="tool_choice",
        )
    return _chosen(functions, choice, user_text)


def _chosen(functions: list[Function], choice: Any, user_text: str) -> ToolCall | None:
    """Choose a mentioned tool. `required` falls back to the first tool, `auto` to text."""
    mentioned = _mentioned(functions, user_text)
    if choice == "required":
        return _call(mentioned or functions[0])
    return None if mentioned is None else _call(mentioned)


def _mentioned(functions: Iterable[Function], user_text: str) -> Function | None:
    lowered = user_text.lower()
    for function in functions:
        words = (word.lower() for word in _WORD.findall(function.name) if len(word) >= _MIN_WORD)
        if any(word in lowered for word in words):
            return function
    return None


def _call(function: Function, *, is_named: bool = False) -> ToolCall:
    schema = function.parameters or {"type": "object", "properties": {}}
    return ToolCall(function.name, json_constraint(schema), is_named)


def _name_of(choice: dict[str, Any]) -> str:
    """Return the tool name of a `tool_choice` object."""
    function = choice.get("function")
    if not isinstance(function, dict):
        raise _misused("", f"Invalid value for `function`: `{function}` in `tool_choice`!")
    if "name" not in function:
        raise _misused(".name", "Expected field `name` in `function` in `tool_choice`!")
    name = function["name"]
    if not isinstance(name, str) or not name:
        raise _misused(".name", f"Invalid `name` in `function`: `{name}` in `tool_choice`!")
    return name


def _misused(field: str, problem: str) -> ApiError:
    return invalid(f"{problem} {_NAMED_TOOL}", param=f"tool_choice.function{field}")
