"""Requests of every scheduled endpoint whose answers must equal the engine's own."""

import math
from collections.abc import Iterable
from typing import Any

import httpx

from tests.engines.vllm.conformance import without_ids

Case = tuple[str, dict[str, Any]]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"max_tokens": 40, "temperature": 0}
GENERATED: list[Case] = [
    ("/v1/chat/completions", {"messages": QUESTION, **GREEDY}),
    ("/v1/completions", {"prompt": "What is", **GREEDY}),
    ("/v1/responses", {"input": "What is the capital of France?", "max_output_tokens": 40, "temperature": 0}),
    ("/v1/messages", {"messages": QUESTION, **GREEDY}),
]

TEXTS = ["Paris is a city.", "A cat sleeps on the mat.", "The train to Lyon is late."]
QUERY = "Which city is the capital of France?"
RANK: dict[str, Any] = {"query": QUERY, "documents": TEXTS}
SCORE: dict[str, Any] = {"text_1": QUERY, "text_2": TEXTS}
RANKED: list[Case] = [
    ("/score", SCORE),
    ("/v1/score", {**SCORE, "text_2": TEXTS[0]}),
    ("/rerank", RANK),
    ("/v1/rerank", {**RANK, "top_n": 2}),
    ("/v2/rerank", RANK),
    ("/classify", {"input": TEXTS}),
    ("/pooling", {"input": TEXTS, "task": "classify"}),
]

EMBED: dict[str, Any] = {"texts": TEXTS, "embedding_types": ["float"]}
EMBEDDED: list[Case] = [
    ("/v1/embeddings", {"input": TEXTS}),
    ("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}),
    ("/v2/embed", EMBED),
    ("/pooling", {"input": TEXTS, "task": "embed"}),
]


def compared_paths() -> set[str]:
    """Return the paths that are compared with an engine."""
    return {path for path, _ in (*GENERATED, *RANKED, *EMBEDDED)}


async def same_answer(clients: Iterable[httpx.AsyncClient], path: str, body: dict[str, Any]) -> Any:
    """Return the common answer of these servers, without IDs and times.

    A model's numbers may differ in their last digits: they depend on the rest of the batch.
    """
    answers = [await client.post(path, json={"model": "m", **body}) for client in clients]
    assert [answer.status_code for answer in answers] == [200] * len(answers), [a.text for a in answers]
    first, *others = [without_ids(answer.json()) for answer in answers]
    assert all(_agree(first, other) for other in others), (first, others)
    return first


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_agree(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5)
    return bool(one == other)
