"""Requests for comparisons with vLLM's answers: of the emulated engine, and of assembled streams."""

from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    TEXT: {"prompt": "What is"},
}
# Parameters with which the answers of the emulated engine have the form of vLLM's.
ANSWERED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"max_tokens": 2}),
    (TEXT, {"max_tokens": 2.0, "temperature": "0.5", "ignore_eos": 1}),
]


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
    """Return the form of the first choice."""
    (choice,) = response.json()["choices"]
    return form({**choice, "stop_reason": None})
