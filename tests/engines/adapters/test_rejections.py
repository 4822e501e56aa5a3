"""Rejections by which engines report that a request is too long."""

import json

import pytest

from serve_app.core.events import DispatchFailure
from serve_app.engines.adapters.server import is_too_long, reported_context_limit
from serve_app.serving.gateway.answer.responses import TooLongError, failure_of
from tests.engines.adapters.recorded_rejections import REJECTIONS


@pytest.mark.parametrize("name", REJECTIONS)
def test_every_engine_is_understood_and_its_limit_is_read(name: str) -> None:
    status, body, limit = REJECTIONS[name]
    failure = failure_of(status, [], json.dumps(body).encode())
    assert isinstance(failure, TooLongError)
    assert failure.failure is DispatchFailure.TOO_LONG
    assert reported_context_limit(str(failure)) == limit
    # The client receives the engine's own message.
    error = body.get("error", body)
    assert failure.message == (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    "message",
    [
        "temperature must be positive",
        "`max_new_tokens` must be strictly positive",
        "max_tokens must be at least 1, got 0",
        "the context is too noisy",
    ],
)
def test_other_rejections_are_not_taken_for_it(message: str) -> None:
    assert not is_too_long(message)
    assert reported_context_limit(message) is None
    for status in (400, 422):
        assert failure_of(status, [], json.dumps({"error": {"message": message}}).encode()) is None


def test_numbers_may_be_written_with_commas() -> None:
    assert (
        reported_context_limit("the maximum context length is 131,072 tokens, you asked for 200,000")
        == 131_072
    )


def test_a_limit_of_nothing_is_none() -> None:
    assert reported_context_limit("exceeds the available context size (0 tokens)") is None
