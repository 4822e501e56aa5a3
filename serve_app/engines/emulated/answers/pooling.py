"""Answers that hold numbers instead of text, without a model: equal for equal inputs, unrelated otherwise."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.engines.emulated.answers.completions import encode
from serve_app.engines.emulated.answers.embeddings import embedding

_LABELS = ("LABEL_0", "LABEL_1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledHead:
    """What the parts of such an answer need.

    Attributes:
        seeds: one for each input, which decides its numbers.
        texts: of the inputs.
        prompt_tokens: of all inputs.
        dimensions: of vectors.
        most: parts of the answer that are wanted; None for all.
    """

    request_id: str
    created: int
    model: str
    seeds: Sequence[str]
    texts: Sequence[str]
    prompt_tokens: int
    dimensions: int
    most: int | None = None

    @property
    def scores(self) -> list[float]:
        """Between 0 and 1."""
        return [random.Random(seed).random() for seed in self.seeds]  # noqa: S311 - placeholders

    @property
    def vectors(self) -> list[list[float]]:
        """Of length 1."""
        return [embedding(seed, self.dimensions) for seed in self.seeds]

    def listed(self, data: list[dict[str, Any]]) -> bytes:
        """The form that most of them have."""
        usage = {**self.usage(), "completion_tokens": 0, "prompt_tokens_details": None}
        head = {"id": self.request_id, "object": "list", "created": self.created, "model": self.model}
        return encode({**head, "data": data, "usage": usage})

    def usage(self) -> dict[str, Any]:
        """Nothing is generated."""
        return {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}


def pooling_answer(head: PooledHead) -> bytes:
    """`/pooling`: a vector for each input."""
    return head.listed(
        [{"index": index, "object": "pooling", "data": vector} for index, vector in enumerate(head.vectors)]
    )


def classes_answer(head: PooledHead) -> bytes:
    """`/classify`: how likely each class is."""
    return head.listed([_class_of(index, score) for index, score in enumerate(head.scores)])


def scores_answer(head: PooledHead) -> bytes:
    """`/score`: one number for each pair."""
    return head.listed(
        [{"index": index, "object": "score", "score": score} for index, score in enumerate(head.scores)]
    )


def ranks_answer(head: PooledHead) -> bytes:
    """`/rerank`: the documents, those that fit best first."""
    results = [
        {"index": index, "document": {"text": text, "multi_modal": None}, "relevance_score": score}
        for index, (text, score) in enumerate(zip(head.texts, head.scores, strict=True))
    ]
    results.sort(key=lambda result: -float(str(result["relevance_score"])))
    answer = {"id": head.request_id, "model": head.model, "usage": head.usage()}
    return encode({**answer, "results": results[: head.most]})


def cohere_answer(head: PooledHead) -> bytes:
    """`/v2/embed`: a vector for each text."""
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": head.prompt_tokens}}
    answer = {"id": head.request_id, "embeddings": {"float": head.vectors}, "texts": head.texts}
    return encode({**answer, "meta": meta, "response_type": "embeddings_by_type"})


def _class_of(index: int, score: float) -> dict[str, Any]:
    probs = [1.0 - score, score]
    label = _LABELS[math.floor(score + 0.5)]
    return {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
