"""Transcriptions and translations: forms are read as far as scheduling needs, and passed on unchanged."""

import io
import wave
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import openai
import pytest

from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.serving.gateway.request.parse import ParsedBody
from serve_app.serving.gateway.routes.audio import read_audio

from .builders import MODEL, Engine, FakeDispatcher, gateway, serving
from .fleet import Fleet, fleet_of

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")


def sound(seconds: float) -> bytes:
    """Silence, 16 bits at 16 kHz."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(int(seconds * 32_000)))
    return written.getvalue()


def form(upload: bytes | None, **fields: str) -> tuple[bytes, bytes]:
    """Body and content type, as clients write them."""
    files = {} if upload is None else {"file": ("speech.wav", upload)}
    request = httpx.Request("POST", "http://x", data=fields, files=files or {"none": b""})
    return request.read(), request.headers["content-type"].encode()


def read(upload: bytes | None, **fields: str) -> ParsedBody:
    return read_audio(*form(upload, **fields))


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        engine = EmulatedEngine(EmulatedEngineSettings(served_model_names=(MODEL,), speed_up=4.0))
        await engine.start()
        stack.push_async_callback(engine.stop)
        yield await stack.enter_async_context(fleet_of([engine.app]))


def test_the_size_of_a_sound_tells_its_tokens() -> None:
    spec = read(sound(10), model="m").spec
    assert (spec.max_output_tokens, spec.choices, spec.shape.prompt_tokens, spec.streamed) == (
        41,
        1,
        4,
        False,
    )
    spec = read(sound(100), model="m", stream="true", prompt="Names: Ada, Grace.").spec
    assert (spec.choices, spec.shape.prompts, spec.streamed) == (4, 4, True)
    assert spec.max_output_tokens == 101
    # No sequence is longer than a piece of thirty seconds.
    hour = read(sound(3_600), model="m").spec
    assert hour.max_output_tokens is not None
    assert hour.max_output_tokens <= 4 * 30
    # Compressed: by its size alone.
    assert read(b"ID3" + bytes(40_000), model="m").spec.max_output_tokens == 41
    assert read(sound(10), model="m", max_completion_tokens="7").spec.max_output_tokens == 7


@pytest.mark.parametrize("path", PATHS)
async def test_the_client_of_openai_gets_text_and_streams(fleet: Fleet, path: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{fleet.http.base_url}/v1", api_key="none") as sdk:
        if path == PATHS[1]:
            assert (await sdk.audio.translations.create(model=MODEL, file=("a.wav", sound(5)))).text
            return
        answer = await sdk.audio.transcriptions.create(model=MODEL, file=("a.wav", sound(5)))
        assert len(answer.text) > 20
        stream = await fleet.http.post(
            path, data={"model": MODEL, "stream": "true"}, files={"file": ("a.wav", sound(5))}
        )
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.text.count("transcription.chunk") >= 10
        assert stream.text.endswith("data: [DONE]\n\n")


async def test_a_form_reaches_the_engine_byte_by_byte_and_counts_as_any_other() -> None:
    engine = Engine()
    async with AsyncExitStack() as stack:
        dispatcher = FakeDispatcher([await stack.enter_async_context(serving(engine))], engine_priority=7)
        front = await stack.enter_async_context(serving(gateway(dispatcher)))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{front}"))
        body, content_type = form(sound(30), model=MODEL, language="de")
        headers = {"content-type": content_type.decode(), "x-priority": "batch", "x-tenant": "radio"}
        answer = await http.post(PATHS[0], content=body, headers=headers)
    assert answer.json() == {"text": "hello", "usage": {"type": "duration", "seconds": 30}}
    assert engine.bodies == [body]
    assert engine.paths == [PATHS[0]]
    assert engine.heads[0][b"content-type"] == content_type
    (submission,) = dispatcher.submissions
    assert (submission.priority, submission.tenant) == ("batch", "radio")
    assert dispatcher.outcomes() == ["completed"]


@pytest.mark.parametrize(
    ("upload", "fields", "param", "words"),
    [
        (b"x", {}, "model", "model is missing"),
        (None, {"model": MODEL}, "file", "file is missing"),
        (b"x", {"model": "nobody"}, "model", "is not served here"),
        (b"x", {"model": MODEL, "max_completion_tokens": "-4"}, "max_completion_tokens", "above 0"),
        (b"x", {"model": MODEL, "user": "u" * 300_000}, None, "longer than"),
        (b"x", {f"f{n}": "x" for n in range(200)}, None, "at most 100 fields"),
    ],
)
async def test_bad_forms_are_refused_by_field_and_remedy(
    fleet: Fleet, upload: bytes | None, fields: dict[str, str], param: str | None, words: str
) -> None:
    body, content_type = form(upload, **fields)
    headers = {"content-type": content_type.decode()}
    refused = await fleet.http.post(PATHS[0], content=body, headers=headers)
    error = refused.json()["error"]
    assert refused.status_code == (404 if param == "model" and fields else 400)
    assert error["param"] == param
    assert words in error["message"]


async def test_what_is_no_form_or_a_part_of_one_is_refused(fleet: Fleet) -> None:
    body, content_type = form(sound(1), model=MODEL)
    for broken, kind in (
        (body, b"application/json"),
        (body, b"multipart/form-data"),
        (body[: len(body) // 2], content_type),
        (b"", content_type),
        (b"nothing of the kind", content_type),
        (body, b"multipart/form-data; boundary=another"),
    ):
        refused = await fleet.http.post(PATHS[0], content=broken, headers={"content-type": kind.decode()})
        assert refused.status_code == 400, (broken[:40], kind)
        assert "is no form" in refused.json()["error"]["message"]


def _two_models(second_name: bytes = b"model", more: bytes = b"") -> bytes:
    """A form that names the model twice, the second time under another name or in another way."""
    parts = (b'name="model"', MODEL.encode()), (b'name="' + second_name + b'"' + more, b"another")
    written = [b"Content-Disposition: form-data; " + name + b"\r\n\r\n" + value for name, value in parts]
    written.append(b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nx')
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in written) + b"--b--\r\n"


@pytest.mark.parametrize(
    ("body", "types", "words"),
    [
        # Starlette decodes names by the charset of the header: this one is `model` in UTF-7.
        (_two_models(b"+AG0AbwBkAGUAbA-"), ["multipart/form-data; boundary=b; charset=utf-7"], "charset"),
        # Of two headers an engine takes the first, and a gateway the last.
        (
            _two_models(b"other"),
            ["multipart/form-data; boundary=c", "multipart/form-data; boundary=b"],
            "content-type twice",
        ),
        # Some engines take the first of two fields, others the last.
        (_two_models(), ["multipart/form-data; boundary=b"], "model is given twice"),
        (_two_models(more=b'; filename="x"'), ["multipart/form-data; boundary=b"], "model is given twice"),
    ],
)
async def test_a_form_that_an_engine_might_read_otherwise_is_refused(
    body: bytes, types: list[str], words: str
) -> None:
    engine = Engine()
    async with AsyncExitStack() as stack:
        dispatcher = FakeDispatcher([await stack.enter_async_context(serving(engine))])
        front = await stack.enter_async_context(serving(gateway(dispatcher)))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{front}"))
        headers = [("content-type", each) for each in types]
        refused = await http.post(PATHS[0], content=body, headers=headers)
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]
    assert engine.bodies == []


def test_fields_that_are_lists_may_be_repeated_and_utf_8_may_be_said() -> None:
    body = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="' + name + b'"\r\n\r\n' + value + b"\r\n"
        for name, value in (
            (b"timestamp_granularities[]", b"word"),
            (b"timestamp_granularities[]", b"segment"),
            (b"model", b"m"),
            (b'file"; filename="a.wav', b"x"),
        )
    )
    parsed = read_audio(body + b"--b--\r\n", b"multipart/form-data; boundary=b; charset=UTF-8")
    assert parsed.spec.model == "m"
