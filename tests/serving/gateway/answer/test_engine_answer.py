"""Classification of engine answers: forwarded to the client, or a put-back."""

import json

import pytest

from serve_app.core.events import DispatchFailure
from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import TooLongError, failure_of, outcome_of

# vLLM 0.32's wording in its renderers, token limits and input processor.
VLLM_TOO_LONG = [
    "This model's maximum context length is 512 tokens. However, your prompt contains 900 input tokens, ...",
    "Input length (900) exceeds model's maximum context length (512).",
    "The decoder prompt (length 900) is longer than the maximum model length of 512. Make sure ...",
    "max_tokens=900 cannot be greater than max_model_len=512. Please request fewer output tokens.",
]


def body(message: str, code: object = 400, *, nested: bool = True) -> bytes:
    detail = {"object": "error", "message": message, "type": "BadRequestError", "param": "p", "code": code}
    return json.dumps({"error": detail} if nested else detail).encode()


@pytest.mark.parametrize("message", VLLM_TOO_LONG)
@pytest.mark.parametrize("nested", [True, False])
def test_every_wording_of_too_long_is_understood(message: str, nested: bool) -> None:
    failure = failure_of(400, [], body(message, nested=nested))
    assert isinstance(failure, TooLongError)
    assert failure.failure is DispatchFailure.TOO_LONG
    assert (failure.message, failure.param) == (message, "p")


def test_openais_own_code_for_too_long_is_understood() -> None:
    assert isinstance(failure_of(400, [], body("no", "context_length_exceeded")), TooLongError)


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (401, DispatchFailure.UNREACHABLE),
        (403, DispatchFailure.UNREACHABLE),
        (429, DispatchFailure.BUSY),
        (503, DispatchFailure.BUSY),
        (500, DispatchFailure.ENGINE_ERROR),
        (502, DispatchFailure.ENGINE_ERROR),
    ],
)
def test_faults_of_a_replica_mean_another_try(status: int, failure: DispatchFailure) -> None:
    found = failure_of(status, [], body("why", status))
    assert found is not None
    assert found.failure is failure
    assert str(found) == f"the engine answered {status}: why"


def test_a_dead_core_loses_the_request_and_a_draining_replica_has_not_seen_it() -> None:
    error_text = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    died = failure_of(500, [], body(error_text, 500))
    draining = failure_of(503, [(b"x-replica-draining", b"1")], b"this replica is draining")
    assert died is not None
    assert draining is not None
    assert (died.failure, draining.failure) == (DispatchFailure.LOST, DispatchFailure.UNREACHABLE)


@pytest.mark.parametrize("status", [200, 204, 302, 400, 404, 409, 422, 501, 504])
def test_all_else_is_the_clients(status: int) -> None:
    assert failure_of(status, [], body("temperature must be positive", status)) is None


def test_any_bytes_may_be_an_error_body() -> None:
    assert failure_of(400, [], b"\xff\x00") is None
    found = failure_of(500, [], b"Internal Server Error")
    assert str(found) == "the engine answered 500: Internal Server Error"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.COMPLETED),
        (400, Outcome.REJECTED_INVALID),
        (404, Outcome.REJECTED_INVALID),
        (413, Outcome.REJECTED_BODY_TOO_LARGE),
        (501, Outcome.REJECTED_INVALID),
    ],
)
def test_an_answer_passed_on_concludes_its_request(status: int, outcome: Outcome) -> None:
    assert outcome_of(status) is outcome
