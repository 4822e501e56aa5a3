"""Which tool an answer calls, from `tools` and `tool_choice`; refusals are in vLLM's words.

`auto` leaves the decision to the model. Here a tool is called when a word of its name stands in the last
message and that is the user's, so that an agent gets a call for its question and text for the tool's result.
"""

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from serve_app.engines.emulated.content.constraints import is_given, json_constraint, read_raw
from serve_app.engines.emulated.content.spec import CallForm, ToolCall
from serve_app.engines.emulated.errors import ApiError, invalid

# Shorter words of a name ("get", "set", "run") are in many sentences.
_MIN_WORD = 4
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_USAGE = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None = None


class ChatTool(msgspec.Struct):
    """A tool of a chat completion."""

    function: Function
    type: Literal["function"] = "function"


class ResponsesTool(msgspec.Struct):
    """A tool of the Responses API: a function, or one that the server would have to bring."""

    type: str
    name: str = ""
    parameters: dict[str, Any] | None = None


def chat_call(tools: msgspec.Raw, tool_choice: msgspec.Raw, last_words: str) -> ToolCall | None:
    """The call of a chat completion, None for text.

    Args:
        tools: the field of the request.
        tool_choice: likewise.
        last_words: text of the last message, empty unless it is the user's.
    """
    functions: list[Function] | None = None
    if is_given(tools):
        functions = [tool.function for tool in read_raw(tools, list[ChatTool])]
        if not functions:
            raise invalid(
                "`tools` must not be an empty array. Either provide at least one tool or omit the field "
                "entirely.",
                param="tools",
            )
    choice = read_raw(tool_choice, Any) if is_given(tool_choice) else None
    if choice == "none" or (choice is None and functions is None):
        return None
    if functions is None:
        raise invalid("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if isinstance(choice, dict):
        return _call(_named(functions, _name_of(choice)), CallForm.NAMED)
    if choice not in {None, "auto", "required"}:
        raise invalid(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or '
            '"required" are supported.',
            param="tool_choice",
        )
    return _chosen(functions, choice, last_words)


def responses_call(tools: msgspec.Raw, tool_choice: msgspec.Raw, last_words: str) -> ToolCall | None:
    """The call of a response, None for text; tools other than functions are never called."""
    given = read_raw(tools, list[ResponsesTool]) if is_given(tools) else []
    functions = [Function(tool.name, tool.parameters) for tool in given if tool.type == "function"]
    choice = read_raw(tool_choice, Any) if is_given(tool_choice) else "auto"
    if isinstance(choice, dict) and choice.get("type") in {"function", "custom"}:
        name = choice.get("name")
        found = [function for function in functions if function.name == name]
        if not found:
            raise invalid("Tool choice 'function' not found in 'tools' parameter.", param="tool_choice")
        return _call(found[0], CallForm.NAMED)
    if choice == "required" and not functions:
        raise invalid("Tool choice 'required' must be specified with 'tools' parameter.", param="tool_choice")
    return None if choice == "none" else _chosen(functions, choice, last_words)


def _chosen(functions: list[Function], choice: Any, last_words: str) -> ToolCall | None:
    """The call of `required`: a tool that is mentioned, else the first; of `auto`: one that is mentioned."""
    mentioned = _mentioned(functions, last_words)
    if choice == "required":
        return _call(mentioned or functions[0], CallForm.REQUIRED)
    return None if mentioned is None else _call(mentioned, CallForm.AUTO)


def _mentioned(functions: Iterable[Function], last_words: str) -> Function | None:
    lowered = last_words.lower()
    for function in functions:
        words = (word.lower() for word in _WORD.findall(function.name) if len(word) >= _MIN_WORD)
        if any(word in lowered for word in words):
            return function
    return None


def _call(function: Function, form: CallForm) -> ToolCall:
    schema = function.parameters or {"type": "object", "properties": {}}
    return ToolCall(function.name, json_constraint(schema), form)


def _named(functions: list[Function], name: str) -> Function:
    for function in functions:
        if function.name == name:
            return function
    raise invalid(
        "The tool specified in `tool_choice` does not match any of the specified `tools`",
        param="tool_choice",
    )


def _name_of(choice: dict[str, Any]) -> str:
    function = choice.get("function")
    if not isinstance(function, dict):
        raise _misuse("", f"Invalid value for `function`: `{function}` in `tool_choice`!")
    if "name" not in function:
        raise _misuse(".name", "Expected field `name` in `function` in `tool_choice`!")
    name = function["name"]
    if not isinstance(name, str) or not name:
        raise _misuse(".name", f"Invalid `name` in `function`: `{name}` in `tool_choice`!")
    return name


def _misuse(field: str, problem: str) -> ApiError:
    return invalid(f"{problem} {_USAGE}", param=f"tool_choice.function{field}")
