"""Requests on which the emulated engine must agree with vLLM: rejections, and the form of answers."""

from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    TEXT: {"prompt": "What is"},
}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}

# Parameters that both reject with the same message.
REJECTED: list[tuple[str, dict[str, Any]]] = [
    *((path, {name: value}) for path in (CHAT, TEXT) for name, value in (
        ("temperature", -0.5), ("temperature", 3.0), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -5),
        ("min_p", 2.0), ("presence_penalty", 2.5), ("frequency_penalty", -2.5), ("repetition_penalty", 0.0),
        ("stop", ""), ("max_tokens", 0), ("min_tokens", -1), ("n", 0),
        ("stream_options", {"include_usage": True}),
        ("structured_outputs", {"choice": []}), ("structured_outputs", {"json": "{"}),
        ("structured_outputs", {"json": " "}), ("structured_outputs", {"json_object": False}),
    )),
    (CHAT, {"n": 2, "temperature": 0.0}),
    (CHAT, {"max_tokens": 3, "min_tokens": 4}),
    (CHAT, {"top_logprobs": 2}),
    (CHAT, {"logprobs": True, "top_logprobs": -2}),
    (CHAT, {"logprobs": True, "top_logprobs": 21}),
    (TEXT, {"logprobs": -3}),
    (TEXT, {"logprobs": 21}),
    (CHAT, {"tools": []}),
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"tool_choice": "always", "tools": [TOOL]}),
    (CHAT, {"tool_choice": {"type": "function"}, "tools": [TOOL]}),
    (CHAT, {"tool_choice": {"type": "function", "function": {}}, "tools": [TOOL]}),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": ""}}, "tools": [TOOL]}),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [TOOL]}),
    (CHAT, {"response_format": {"type": "json_schema"}}),
    (CHAT, {"structured_outputs": {"json": {}, "regex": "a"}}),
]  # fmt: skip

# Parameters that both accept, with answers of the same form.
ANSWERED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 2, "max_tokens": 2}),
    (CHAT, {"logprobs": True, "max_tokens": 2}),
    (TEXT, {"logprobs": 2, "max_tokens": 2}),
    (TEXT, {"logprobs": 0, "max_tokens": 2}),
    (TEXT, {"max_tokens": 2.0, "temperature": "0.5", "ignore_eos": 1, "stop_token_ids": ["5"]}),
    (CHAT, {"max_tokens": "2", "seed": 3.0, "logprobs": "true"}),
    (TEXT, {"structured_outputs": {"choice": ["yes"]}, "max_tokens": 20}),
    (TEXT, {"structured_outputs": {"regex": "[ab]{3}"}, "max_tokens": 20}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"],
        "additionalProperties": False}}}, "max_tokens": 60}),
]  # fmt: skip


# Parameters whose answers are equal in one piece and assembled from a stream.
ASSEMBLED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"max_tokens": 20}),
    (CHAT, {"max_tokens": 9, "n": 2, "temperature": 0.7, "seed": 3}),
    (CHAT, {"max_tokens": 9, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"max_tokens": 60, "stop": ["a"]}),
    (CHAT, {"max_tokens": 60, "stop": ["a"], "include_stop_str_in_output": True}),
    (CHAT, {"max_tokens": 20, "structured_outputs": {"choice": ["yes"]}}),
    (CHAT, {"max_tokens": 5, "messages": [{"role": "user", "content": "many words " * 100}]}),
    (TEXT, {"max_tokens": 20}),
    (TEXT, {"max_tokens": 7, "prompt": ["one", "two"], "n": 2, "temperature": 1.0, "seed": 1}),
    (TEXT, {"max_tokens": 7, "logprobs": 2}),
    (TEXT, {"max_tokens": 40, "stop": ["e"], "logprobs": 1}),
    (TEXT, {"max_tokens": 3, "prompt": "many words " * 100}),
]


def without_ids(value: Any) -> Any:
    """Remove IDs, times, signatures, and what streams lack: nulls and `system_fingerprint`."""
    left_out = {"id", "created", "created_at", "signature", "system_fingerprint"}
    if isinstance(value, dict):
        compared = {key: without_ids(item) for key, item in value.items() if key not in left_out}
        return {key: item for key, item in compared.items() if item is not None}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


async def answer(client: httpx.AsyncClient, path: str, parameters: dict[str, Any]) -> httpx.Response:
    """Return the answer to a request with these parameters."""
    return await client.post(path, json={"model": "m", **ASK[path], **parameters})


def form(value: Any) -> Any:
    """Return an answer's keys at all levels with the types of their values; null matches anything."""
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return type(value).__name__


def choice_form(response: httpx.Response) -> Any:
    """Return the form of the first choice, with sizes for the words of `top_logprobs`, which differ."""
    (choice,) = response.json()["choices"]
    logprobs = choice.get("logprobs") or {}
    if "top_logprobs" in logprobs:
        logprobs["top_logprobs"] = [len(item) for item in logprobs["top_logprobs"]]
    return form({**choice, "stop_reason": None})
