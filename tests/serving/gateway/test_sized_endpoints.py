"""Ranks, scores, pooling and audio: sized by body bytes, forwarded unchanged and counted."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serve_app.serving.gateway.request.endpoints import AUDIO, TEXTS, read_form

from .builders import MODEL, FakeDispatcher
from .conftest import GatewayHarness, running_gateway

TEXT_PATHS = (
    *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    *("/pooling", "/classify", "/v2/embed"),
)
AUDIO_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")


@pytest.fixture
async def harness() -> AsyncIterator[GatewayHarness]:
    async with running_gateway(FakeDispatcher([], engine_priority=7)) as made:
        yield made


def form(upload: bytes | None, **fields: str) -> tuple[bytes, bytes]:
    """Return body and content type as clients write them."""
    files = {} if upload is None else {"file": ("speech.wav", upload)}
    request = httpx.Request("POST", "http://x", data=fields, files=files or {"none": b""})
    return request.read(), request.headers["content-type"].encode()


@pytest.mark.parametrize("path", TEXT_PATHS)
async def test_texts_are_scheduled_by_the_bytes_of_their_body(harness: GatewayHarness, path: str) -> None:
    body = {"model": MODEL, "query": "pets", "documents": ["a cat", "a dog"] * 300}
    answer = await harness.http.post(path, json=body, headers={"x-priority": "batch", "x-tenant": "shop"})
    assert answer.status_code == 200
    assert harness.engine.paths == [path]
    size = len(answer.request.content)
    (submission,) = harness.dispatcher.submissions
    spec, shape = submission.spec, submission.spec.shape
    assert (shape.tool_bytes, shape.text_bytes, shape.prompts) == (size, 0, -(-size // TEXTS.bytes_per_piece))
    assert (spec.max_output_tokens, spec.streamed) == (0, False)
    assert (submission.priority, submission.tenant) == ("batch", "shop")
    assert harness.dispatcher.outcomes() == ["completed"]


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"{", "not valid JSON"), (b"{}", "model is missing"), (b'{"model":5}', "model is inv")],
)
async def test_a_body_without_a_model_is_rejected(harness: GatewayHarness, body: bytes, words: str) -> None:
    answer = await harness.http.post("/rerank", content=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert not harness.dispatcher.submissions


@pytest.mark.parametrize("path", AUDIO_PATHS)
async def test_a_form_reaches_the_engine_byte_by_byte_and_counts_as_any_other(
    harness: GatewayHarness, path: str
) -> None:
    body, content_type = form(bytes(300_000), model=MODEL, language="de")
    headers = {"content-type": content_type.decode(), "x-priority": "batch", "x-tenant": "radio"}
    answer = await harness.http.post(path, content=body, headers=headers)
    assert answer.json() == {"text": "hello", "usage": {"type": "duration", "seconds": 30}}
    assert harness.engine.bodies == [body]
    assert harness.engine.heads[0][b"content-type"] == content_type
    (submission,) = harness.dispatcher.submissions
    assert (submission.priority, submission.tenant) == ("batch", "radio")
    # The number of pieces follows from the bytes; each piece is a sequence with its own tokens.
    spec = submission.spec
    assert (spec.choices, spec.shape.prompts, spec.shape.prompt_tokens) == (3, 3, 12)
    assert spec.max_output_tokens == AUDIO.output_tokens
    assert harness.dispatcher.outcomes() == ["completed"]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({}, 400, "model is missing"),
        ({"model": "nobody"}, 404, "unknown model"),
        ({"model": "m" * 2_000}, 400, "longer than"),
        ({f"f{n}": "x" for n in range(200)}, 400, "at most 100 fields"),
    ],
)
async def test_bad_forms_are_rejected_by_field_and_remedy(
    harness: GatewayHarness, fields: dict[str, str], status: int, words: str
) -> None:
    body, content_type = form(b"x", **fields)
    headers = {"content-type": content_type.decode()}
    rejected = await harness.http.post(AUDIO_PATHS[0], content=body, headers=headers)
    assert rejected.status_code == status
    assert words in rejected.json()["error"]["message"]
    assert harness.engine.bodies == []


async def test_invalid_forms_are_rejected(harness: GatewayHarness) -> None:
    body, content_type = form(b"x" * 100, model=MODEL)
    for broken, kind in (
        (body, b"application/json"),
        (body, b"multipart/form-data"),
        (body[: len(body) // 2], content_type),
        (b"", content_type),
        (b"nothing of the kind", content_type),
        (body, b"multipart/form-data; boundary=another"),
    ):
        headers = {"content-type": kind.decode()}
        rejected = await harness.http.post(AUDIO_PATHS[0], content=broken, headers=headers)
        assert rejected.status_code == 400, (broken[:40], kind)
        assert "is not a form" in rejected.json()["error"]["message"]


def _two_models(second_name: bytes = b"model", more: bytes = b"") -> bytes:
    """Build a form that names the model twice, the second time differently."""
    parts = (b'name="model"', MODEL.encode()), (b'name="' + second_name + b'"' + more, b"another")
    written = [b"Content-Disposition: form-data; " + name + b"\r\n\r\n" + value for name, value in parts]
    written.append(b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nx')
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in written) + b"--b--\r\n"


@pytest.mark.parametrize(
    ("body", "types", "words"),
    [
        # Starlette decodes names by the header's charset: this one is `model` in UTF-7.
        (_two_models(b"+AG0AbwBkAGUAbA-"), ["multipart/form-data; boundary=b; charset=utf-7"], "charset"),
        # Of two headers, engines read the first and a gateway the last.
        (
            _two_models(b"other"),
            ["multipart/form-data; boundary=c", "multipart/form-data; boundary=b"],
            "content-type occurs twice",
        ),
        # Of two fields, some engines read the first and others the last.
        (_two_models(), ["multipart/form-data; boundary=b"], "model occurs twice"),
        (_two_models(more=b'; filename="x"'), ["multipart/form-data; boundary=b"], "model occurs twice"),
    ],
)
async def test_a_form_that_an_engine_might_read_otherwise_is_rejected(
    harness: GatewayHarness, body: bytes, types: list[str], words: str
) -> None:
    headers = [("content-type", each) for each in types]
    rejected = await harness.http.post(AUDIO_PATHS[0], content=body, headers=headers)
    assert rejected.status_code == 400
    assert words in rejected.json()["error"]["message"]
    assert harness.engine.bodies == []


def test_fields_that_are_lists_may_be_repeated_and_utf_8_may_be_declared() -> None:
    body = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="' + name + b'"\r\n\r\n' + value + b"\r\n"
        for name, value in (
            (b"timestamp_granularities[]", b"word"),
            (b"timestamp_granularities[]", b"segment"),
            (b"model", b"m"),
            (b'file"; filename="a.wav', b"x"),
        )
    )
    parsed = read_form(body + b"--b--\r\n", b"multipart/form-data; boundary=b; charset=UTF-8")
    assert parsed.spec.model == "m"


async def test_small_questions_go_to_any_replica_and_are_not_scheduled(harness: GatewayHarness) -> None:
    async def send_request(path: str, **fields: Any) -> httpx.Response:
        return await harness.http.post(path, json={"model": MODEL, **fields})

    assert (await send_request("/tokenize", prompt="hello there")).json()["tokens"]
    assert (await harness.http.get("/version")).status_code == 200
    assert (await harness.http.get("/version", params={"model": MODEL})).status_code == 200
    unknown = await harness.http.get("/version", params={"model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert (await harness.http.get("/load")).json() == {"server_load": 0}
    assert (await harness.http.get("/ping")).status_code == 200
    assert not harness.dispatcher.submissions
