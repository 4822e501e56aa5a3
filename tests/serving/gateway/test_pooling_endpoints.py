"""Endpoints that generate nothing, in front of the emulated engine: ranks, scores, classes, vectors."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.errors import Outcome
from serve_app.request import PromptShape, Usage

from .builders import MODEL, FakeDispatcher, gateway, serving

DOCUMENTS = ["the cat sat", "a dog", "it rains"]


class Counter:
    """A gateway over one engine, and what its scheduler heard."""

    def __init__(self, http: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
        self.http, self.dispatcher = http, dispatcher

    async def ask(self, path: str, **fields: Any) -> Any:
        answer = await self.http.post(path, json={"model": MODEL, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def shape(self) -> PromptShape:
        return self.dispatcher.submissions[-1].spec.shape

    @property
    def usage(self) -> Usage:
        kind, outcome, usage = self.dispatcher.events[-1]
        assert (kind, outcome) == ("finished", Outcome.COMPLETED)
        found: Usage = usage
        return found


@pytest.fixture
async def counter() -> AsyncIterator[Counter]:
    engine = EmulatedEngine(
        EmulatedEngineSettings(served_model_names=(MODEL,), profile="laptop", speed_up=20.0)
    )
    await engine.start()
    async with serving(engine.app) as port:
        dispatcher = FakeDispatcher([port])
        app = gateway(dispatcher)
        async with serving(app) as front, httpx.AsyncClient(timeout=30) as http:
            http.base_url = httpx.URL(f"http://127.0.0.1:{front}")
            yield Counter(http, dispatcher)
        app.close()
    await engine.stop()


async def test_documents_are_ranked_under_each_of_the_paths(counter: Counter) -> None:
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        found = await counter.ask(path, query="pets", documents=DOCUMENTS)
        scores = [result["relevance_score"] for result in found["results"]]
        assert scores == sorted(scores, reverse=True)
        assert {result["document"]["text"] for result in found["results"]} == set(DOCUMENTS)
        # An engine reads the query once for each document.
        assert counter.shape.text_bytes == sum(map(len, DOCUMENTS)) + 3 * len("pets")
        assert counter.shape.prompts == 3
        spec = counter.dispatcher.submissions[-1].spec
        assert (spec.max_output_tokens, spec.streamed) == (0, False)
        assert counter.usage == Usage(prompt_tokens=found["usage"]["prompt_tokens"], output_tokens=0)
        first = await counter.ask(path, query="pets", documents=DOCUMENTS, top_n=1)
        assert first["results"] == found["results"][:1]


@pytest.mark.parametrize(
    ("one", "other"),
    [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")],
)
async def test_pairs_are_scored_under_each_of_their_names(counter: Counter, one: str, other: str) -> None:
    for path in ("/v1/score", "/score"):
        found = await counter.ask(path, **{one: "pets", other: DOCUMENTS})
        assert [each["index"] for each in found["data"]] == [0, 1, 2]
        assert counter.usage.prompt_tokens == found["usage"]["prompt_tokens"] > 0
        assert (counter.shape.prompts, counter.shape.text_bytes) == (3, sum(map(len, DOCUMENTS)) + 12)
    each = await counter.ask(path, **{one: DOCUMENTS, other: DOCUMENTS})
    assert len(each["data"]) == 3
    assert counter.shape.text_bytes == 2 * sum(map(len, DOCUMENTS))


async def test_texts_are_classified_and_pooled(counter: Counter) -> None:
    for path in ("/classify", "/pooling"):
        found = await counter.ask(path, input=DOCUMENTS)
        assert len(found["data"]) == 3
        assert counter.usage.prompt_tokens == found["usage"]["prompt_tokens"]
        assert (counter.shape.prompts, counter.shape.text_bytes) == (3, sum(map(len, DOCUMENTS)))


async def test_texts_are_embedded_as_coheres_clients_ask(counter: Counter) -> None:
    found = await counter.ask("/v2/embed", texts=DOCUMENTS, input_type="search_query", output_dimension=8)
    assert [len(vector) for vector in found["embeddings"]["float"]] == [8, 8, 8]
    assert counter.usage.prompt_tokens == found["meta"]["billed_units"]["input_tokens"] > 0
    assert counter.shape.prompts == 3


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/rerank", {"query": "x"}, "documents is missing"),
        ("/score", {"queries": "x"}, "documents is missing"),
        ("/score", {"text_2": "x"}, "queries is missing"),
        ("/classify", {}, "input is missing"),
        ("/pooling", {}, "input is missing"),
        ("/v2/embed", {}, "texts is missing"),
    ],
)
async def test_what_is_missing_is_named(
    counter: Counter, path: str, fields: dict[str, Any], words: str
) -> None:
    answer = await counter.http.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert not counter.dispatcher.submissions


async def test_images_are_media_items(counter: Counter) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}
    pictures = [{"content": [image]}, {"content": [image, {"type": "text", "text": "abc"}]}]
    await counter.http.post("/rerank", json={"model": MODEL, "query": "pets", "documents": pictures})
    assert (counter.shape.media_items, counter.shape.text_bytes, counter.shape.prompts) == (2, 11, 2)
    await counter.http.post("/v2/embed", json={"model": MODEL, "images": ["data:image/png;base64,AAAA"]})
    assert (counter.shape.media_items, counter.shape.text_bytes) == (1, 0)


async def test_small_questions_go_to_any_replica_and_are_not_scheduled(counter: Counter) -> None:
    tokens = (await counter.ask("/tokenize", prompt="hello there"))["tokens"]
    assert (await counter.ask("/detokenize", tokens=tokens))["prompt"]
    assert (await counter.http.get("/version")).json()["version"].startswith("emulated")
    assert (await counter.http.get("/version", params={"model": MODEL})).status_code == 200
    unknown = await counter.http.get("/version", params={"model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    # vLLM has it only with an option, the emulated engine never.
    lacking = await counter.http.get("/tokenizer_info")
    assert (lacking.status_code, lacking.json()["error"]["message"]) == (404, "Not Found")
    assert (await counter.http.get("/load")).json() == {"server_load": 0}
    assert (await counter.http.get("/ping")).status_code == 200
    assert not counter.dispatcher.submissions
