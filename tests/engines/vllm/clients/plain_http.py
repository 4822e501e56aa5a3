"""What is asked without any client's library."""

from tests.engines.vllm.clients.counter import MODEL, Counter


async def small_questions(at: Counter) -> None:
    """What is asked of any replica, and the endpoints that a model of this kind does not have."""
    tokens = (await at.front.post("/tokenize", json={"model": MODEL, "prompt": "Hello there"})).json()
    text = await at.front.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})
    assert text.json() == {"prompt": "Hello there"}
    assert (await at.front.get("/version")).json() == (await at.direct.get("/version")).json()
    for path, body in (("/rerank", {"query": "a", "documents": ["b"]}), ("/pooling", {"input": "a"})):
        answer = await at.front.post(path, json={"model": MODEL, **body})
        assert answer.status_code in {404, 400, 501}, answer.text
        assert answer.json()["error"]["message"]
