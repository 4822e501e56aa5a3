"""Plain HTTP requests, without a client library."""

from tests.engines.vllm.clients.harness import MODEL, ClientHarness


async def small_questions(at: ClientHarness) -> None:
    """Check requests that any replica serves, and endpoints that this kind of model lacks."""
    tokens = (await at.gateway.post("/tokenize", json={"model": MODEL, "prompt": "Hello there"})).json()
    text = await at.gateway.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})
    assert text.json() == {"prompt": "Hello there"}
    assert (await at.gateway.get("/version")).json() == (await at.direct.get("/version")).json()
    for path, body in (("/rerank", {"query": "a", "documents": ["b"]}), ("/pooling", {"input": "a"})):
        answer = await at.gateway.post(path, json={"model": MODEL, **body})
        assert answer.status_code in {404, 400, 501}, answer.text
        assert answer.json()["error"]["message"]
