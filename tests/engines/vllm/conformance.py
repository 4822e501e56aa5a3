"""Requests for comparisons with vLLM's answers: of the emulated engine, and of assembled streams."""

from collections.abc import Iterator
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
_PARIS = [{"role": "user", "content": "What is the capital of France?"}]
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": _PARIS},
    TEXT: {"prompt": "What is"},
    RESPONSES: {"input": "What is", "max_output_tokens": 3},
    MESSAGES: {"messages": _PARIS, "max_tokens": 3},
}
# Parameters with which the answers of the emulated engine have the form of vLLM's.
ANSWERED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"max_tokens": 2}),
    (TEXT, {"max_tokens": 2.0, "temperature": "0.5", "ignore_eos": 1}),
]
# Fields of the emulated engine that vLLM omits, although the schemas of the APIs require them. Without them
# vLLM's own answers fail the checks of llm-comply for responses and messages. Its answers to chats fail by
# nulls where the schema has none, such as `annotations`.
BEYOND_VLLM: dict[str, set[str]] = {
    CHAT: set(),
    RESPONSES: {"completed_at", "error", "prompt_cache_key", "safety_identifier", "store"},
    MESSAGES: {
        "container",
        "content.citations",
        "stop_details",
        "stop_sequence",
        "usage.cache_creation",
        "usage.inference_geo",
        "usage.output_tokens_details",
        "usage.server_tool_use",
        "usage.service_tier",
    },
}

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
    """Return an answer's keys at all levels with the types of their values; null and [] match anything."""
    if isinstance(value, dict):
        return {key: form(item) for key, item in value.items() if item not in (None, [])}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return type(value).__name__


def choice_form(response: httpx.Response) -> Any:
    """Return the form of the first choice."""
    (choice,) = response.json()["choices"]
    return form({**choice, "stop_reason": None})


def added(ours: Any, real: Any, at: str = "") -> Iterator[str]:
    """Yield the fields that only the first of two answers has, at all levels that both have."""
    if isinstance(ours, dict) and isinstance(real, dict):
        for key, item in ours.items():
            yield from added(item, real[key], f"{at}{key}.") if key in real else (at + key,)
    elif isinstance(ours, list) and isinstance(real, list) and ours and real:
        yield from added(ours[0], real[0], at)
