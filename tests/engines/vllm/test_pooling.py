"""Pooling models on a real vLLM engine, through the gateway and directly."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engines.vllm.compared_requests import (
    EMBED,
    EMBEDDED,
    QUERY,
    RANK,
    RANKED,
    SCORE,
    TEXTS,
    same_answer,
)
from tests.engines.vllm.real import ARGS, QUICK_START, TINY, Running, running
from tests.engines.vllm.serving_stack import ServingStack, serving_stack
from tests.engines.vllm.weights.pooling_models import MAX_TOKENS, WIDTH, make_embedding, make_ranking

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]


@contextlib.asynccontextmanager
async def pooled(
    make: Callable[[Path, Path], Path], folder: Path
) -> AsyncIterator[tuple[Running, ServingStack]]:
    args = {**ARGS, "max_model_len": MAX_TOKENS}
    async with (
        running(make(folder, TINY), args=args, env=QUICK_START) as started,
        serving_stack(started.engine, started.limits) as stack,
    ):
        yield started, stack


Pair = tuple[Running, ServingStack]


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def ranking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with pooled(make_ranking, tmp_path_factory.mktemp("ranking")) as pair:
        yield pair


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def embedding(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with pooled(make_embedding, tmp_path_factory.mktemp("embedding")) as pair:
        yield pair


async def both(pair: Pair, path: str, body: dict[str, Any]) -> Any:
    """Return the answer through the gateway, which must equal the engine's own."""
    started, stack = pair
    return await same_answer((stack.http, started.client), path, body)


@pytest.mark.asyncio(loop_scope="class")
class TestRankingEngine:
    @pytest.mark.parametrize(("path", "body"), RANKED)
    async def test_its_answers_are_forwarded_unchanged(
        self, ranking: Pair, path: str, body: dict[str, Any]
    ) -> None:
        await both(ranking, path, body)

    async def test_ranks_are_the_order_of_scores(self, ranking: Pair) -> None:
        scores = await both(ranking, "/score", SCORE)
        ranks = await both(ranking, "/v2/rerank", RANK)
        by_score = {item["index"]: item["score"] for item in scores["data"]}
        assert len(set(by_score.values())) == len(TEXTS)
        assert [item["index"] for item in ranks["results"]] == sorted(by_score, key=lambda at: -by_score[at])

    async def test_many_at_once_are_answered_as_each_alone(self, ranking: Pair) -> None:
        bodies = [{"query": f"{QUERY} {number}", "documents": TEXTS} for number in range(12)]
        alone = [await both(ranking, "/rerank", body) for body in bodies]
        _, stack = ranking
        at_once = await asyncio.gather(
            *(stack.http.post("/rerank", json={"model": "m", **body}) for body in bodies)
        )
        for answer, expected in zip(at_once, alone, strict=True):
            found = [
                (item["index"], pytest.approx(item["relevance_score"], rel=1e-3))
                for item in answer.json()["results"]
            ]
            assert found == [(item["index"], item["relevance_score"]) for item in expected["results"]]

    async def test_a_text_that_is_too_long_is_rejected_with_a_reason(self, ranking: Pair) -> None:
        _, stack = ranking
        answer = await stack.http.post("/rerank", json={"model": "m", **RANK, "documents": ["word " * 900]})
        assert answer.status_code == 400
        assert "maximum context length" in answer.json()["error"]["message"]


@pytest.mark.asyncio(loop_scope="class")
class TestEmbeddingEngine:
    @pytest.mark.parametrize(("path", "body"), EMBEDDED)
    async def test_its_answers_are_forwarded_unchanged(
        self, embedding: Pair, path: str, body: dict[str, Any]
    ) -> None:
        await both(embedding, path, body)

    async def test_a_vector_is_of_the_models_width_and_the_same_on_every_path(self, embedding: Pair) -> None:
        openai = await both(embedding, "/v1/embeddings", {"input": TEXTS})
        cohere = await both(embedding, "/v2/embed", EMBED)
        vectors = [item["embedding"] for item in openai["data"]]
        assert {len(vector) for vector in vectors} == {WIDTH}
        for mine, other in zip(cohere["embeddings"]["float"], vectors, strict=True):
            assert mine == pytest.approx(other, abs=1e-5)
        assert openai["usage"]["prompt_tokens"] > len(TEXTS)
