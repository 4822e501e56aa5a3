import json

import pytest

from experiments.common.load_test.response import ResponseParser
from serve_app.errors import Outcome
from tests.experiments.load_test.scripted import DONE, event, role_event, stream_of, token_event, usage_event


def answer(*pieces: bytes, status: int = 200, complete: bool = True) -> ResponseParser:
    """Return an answer that received these pieces at 1 s, 2 s and so on, and completed at 99 s."""
    one = ResponseParser()
    one.status = status
    for second, piece in enumerate(pieces, start=1):
        one.on_body(piece, float(second))
    if complete:
        one.on_complete(99.0)
    return one


def test_the_first_token_is_the_first_text_and_not_the_role() -> None:
    read = answer(role_event(), token_event(), token_event(), usage_event(20, 2), DONE)
    assert read.outcome is Outcome.COMPLETED
    assert read.first_token_at == 2.0
    assert read.finished_at == 99.0
    assert (read.prompt_tokens, read.output_tokens) == (20, 2)


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"reasoning": "hm"}},
        {"delta": {"reasoning_content": "hm"}},
        {"delta": {"tool_calls": [{"index": 0}]}},
        {"text": "hm"},
    ],
)
def test_reasoning_tool_calls_and_plain_completions_count_as_tokens(choice: object) -> None:
    assert answer(role_event(), event({"choices": [choice]}), DONE).first_token_at == 2.0


def test_it_does_not_matter_where_the_network_cuts_the_stream() -> None:
    whole = b"".join(stream_of(output_tokens=2))
    for cut in range(1, len(whole)):
        read = answer(whole[:cut], whole[cut:])
        assert read.outcome is Outcome.COMPLETED, cut
        assert read.output_tokens == 2
        assert read.first_token_at in {1.0, 2.0}


def test_events_that_end_in_carriage_returns_are_read() -> None:
    whole = b"".join(stream_of(output_tokens=2)).replace(b"\n", b"\r\n")
    for cut in range(1, len(whole)):
        assert answer(whole[:cut], whole[cut:]).outcome is Outcome.COMPLETED


def test_a_long_answer_still_ends_with_its_usage() -> None:
    read = answer(role_event(), *[token_event("x" * 100) for _ in range(500)], usage_event(7, 500), DONE)
    assert (read.outcome, read.output_tokens) == (Outcome.COMPLETED, 500)


def test_a_stream_without_its_end_mark_is_a_failure() -> None:
    read = answer(role_event(), token_event(), usage_event())
    assert read.outcome is Outcome.FAILED
    assert "without [DONE]" in read.detail


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_an_error_inside_the_stream_is_a_failure_wherever_it_occurs(tokens: int) -> None:
    error = event({"error": {"message": "engine died", "code": 500}})
    read = answer(role_event(), *[token_event()] * tokens, error, DONE)
    assert read.outcome is Outcome.FAILED
    assert "engine died" in read.detail


def test_text_that_speaks_of_errors_is_not_an_error() -> None:
    read = answer(role_event(), token_event('{"error": "no"} data: [DONE]\n\n'), usage_event(), DONE)
    assert read.outcome is Outcome.COMPLETED


def test_an_answer_without_any_text_completes_without_a_first_token() -> None:
    read = answer(role_event() + usage_event(5, 1) + DONE)
    assert (read.outcome, read.first_token_at, read.output_tokens) == (Outcome.COMPLETED, None, 1)


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (429, "queue_full", Outcome.REJECTED_QUEUE_FULL),
        (429, "deadline_unmeetable", Outcome.REJECTED_DEADLINE_UNMEETABLE),
        (429, "rate_limit_exceeded", Outcome.REJECTED_RATE_LIMITED),
        (400, "context_length_exceeded", Outcome.REJECTED_TOO_LONG),
        (400, None, Outcome.REJECTED_INVALID),
        (401, "invalid_api_key", Outcome.REJECTED_UNAUTHORISED),
        (404, "model_not_found", Outcome.REJECTED_UNKNOWN_MODEL),
        (502, "engine_failed", Outcome.FAILED),
        (503, "no_replica", Outcome.REJECTED_NO_REPLICA),
        (504, "queue_timeout", Outcome.EXPIRED),
        (418, None, Outcome.FAILED),
    ],
)
def test_rejections_are_classified_by_code_and_status(
    status: int, code: str | None, outcome: Outcome
) -> None:
    body = json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": code}}).encode()
    read = answer(body[:10], body[10:], status=status)
    assert read.outcome is outcome
    assert f"HTTP {status}" in read.detail


def test_a_rejection_that_is_no_json_is_still_a_rejection() -> None:
    read = answer(b"<html>Bad gateway</html>", status=502)
    assert read.outcome is Outcome.FAILED
    assert "Bad gateway" in read.detail


def test_the_first_end_counts() -> None:
    one = ResponseParser()
    one.fail("client gave up", 5.0, Outcome.CANCELLED)
    one.fail("connection closed", 6.0)
    assert (one.outcome, one.finished_at) == (Outcome.CANCELLED, 5.0)
