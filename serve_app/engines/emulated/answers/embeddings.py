"""Embeddings without a model: unit vectors that are equal for equal inputs and unrelated otherwise."""

import base64
import math
import random
from array import array
from collections.abc import Sequence
from typing import Any

from serve_app.engines.emulated.answers.completions import encode


def embedding(seed: str, dimensions: int) -> list[float]:
    """A unit vector that depends on `seed` alone."""
    rng = random.Random(seed)  # noqa: S311 - a placeholder, not a secret
    values = [rng.gauss(0.0, 1.0) for _ in range(dimensions)]
    norm = math.sqrt(sum(value * value for value in values)) or 1.0
    return [value / norm for value in values]


def embeddings_answer(
    request_id: str,
    model: str,
    vectors: Sequence[list[float]],
    *,
    prompt_tokens: int,
    as_base64: bool,
) -> bytes:
    """The body of an embeddings response; base64 (the SDK's default) encodes little-endian 32-bit floats."""
    data: list[dict[str, Any]] = []
    for index, vector in enumerate(vectors):
        value: Any = vector
        if as_base64:
            value = base64.b64encode(array("f", vector).tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": value})
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return encode({"id": request_id, "object": "list", "model": model, "data": data, "usage": usage})
