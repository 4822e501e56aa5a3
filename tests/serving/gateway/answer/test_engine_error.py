"""Engine errors in OpenAI's shape and in other shapes."""

import json
from typing import Any

import pytest

from serve_app.serving.gateway.answer.responses import in_openai_shape
from tests.serving.gateway.builders import chat, error_json, replies
from tests.serving.gateway.conftest import GatewayHarness

EMBEDDINGS = "/v1/embeddings"


def shaped(status: int, body: object) -> dict[str, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers, found = in_openai_shape(
        status, EMBEDDINGS, [(b"content-type", b"text/plain"), (b"x-a", b"1")], raw
    )
    assert headers == [(b"content-type", b"application/json"), (b"x-a", b"1")]
    error: dict[str, Any] = json.loads(found)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("body", [{"detail": "Not Found"}, b"", b"Not Found", {}])
def test_a_route_that_the_engine_lacks_is_named(body: object) -> None:
    assert shaped(404, body) == {
        "message": "the engine of this model does not serve /v1/embeddings",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_found",
    }


@pytest.mark.parametrize(
    ("status", "body", "message", "kind"),
    [
        (405, {"detail": "Method Not Allowed"}, "Method Not Allowed", "invalid_request_error"),
        (400, {"object": "error", "message": "too hot", "type": "X"}, "too hot", "invalid_request_error"),
        (400, {"error": "too hot"}, "too hot", "invalid_request_error"),
        (
            422,
            {"detail": [{"loc": ["body", "n"], "msg": "must be 1"}]},
            "body.n: must be 1",
            "invalid_request_error",
        ),
        (418, b"<h1>teapot</h1>", "<h1>teapot</h1>", "invalid_request_error"),
        (501, b"", "the engine answered 501 without a message", "server_error"),
    ],
)
def test_the_engines_own_message_is_preserved(status: int, body: object, message: str, kind: str) -> None:
    error = shaped(status, body)
    assert (error["message"], error["type"]) == (message, kind)


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_or_an_openai_error_is_forwarded_unchanged(status: int) -> None:
    raw = json.dumps(error_json("no", param="n")).encode()
    headers = [(b"content-type", b"application/json; charset=utf-8")]
    assert in_openai_shape(status, EMBEDDINGS, headers, raw) == (headers, raw)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/embeddings", "/v1/responses"])
async def test_every_route_that_is_passed_on_has_its_errors_in_shape(
    harness: GatewayHarness, path: str
) -> None:
    harness.engine.answers.append(replies(404, {"detail": "Not Found"}))
    answer = await harness.http.post(path, json=chat(prompt="x", input="x"))
    assert answer.status_code == 404
    assert answer.headers["content-length"] == str(len(answer.content))
    assert path in answer.json()["error"]["message"]
