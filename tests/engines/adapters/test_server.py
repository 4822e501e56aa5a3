"""Reading of metrics pages, and of rejections of requests that are too long."""

import json

import pytest

from serve_app.core.events import DispatchFailure
from serve_app.engines.adapters.server import (
    count,
    is_too_long,
    labels,
    mean,
    samples,
    stated_context_limit,
    total,
)
from serve_app.errors import EngineError
from serve_app.serving.gateway.answer.responses import TooLongError, failure_of
from tests.engines.adapters.recorded_rejections import REJECTIONS

PAGE = b"""\
# HELP queue_size Requests that wait.
# TYPE queue_size gauge
queue_size 4
# TYPE queue_size_by_reason gauge
queue_size_by_reason{reason="x"} 9
# TYPE gap_seconds histogram
gap_seconds_bucket{rank="0",le="0.1"} 1
gap_seconds_sum{rank="0"} 1.5
gap_seconds_bucket{rank="1",le="0.1"} 2
gap_seconds_sum{rank="1"} 2.5 1700000000000
# TYPE usage gauge
usage{rank="0"} 0.25
usage{rank="1"} 0.75
# TYPE last gauge
last{a="{x} 7",b="q\\"u"} 3"""


def test_samples_of_one_metric_are_found_between_its_buckets() -> None:
    assert samples(PAGE, b"gap_seconds_sum") == [(b'rank="0"', 1.5), (b'rank="1"', 2.5)]
    assert total(PAGE, b"gap_seconds_sum") == 4.0


def test_a_longer_name_is_another_metric() -> None:
    assert samples(PAGE, b"queue_size") == [(b"", 4.0)]
    assert count(PAGE, b"queue_size") == 4


def test_the_first_name_that_is_there_counts_and_none_is_no_zero() -> None:
    assert mean(PAGE, b"newer_usage", b"usage", b"last") == 0.5
    assert total(PAGE, b"usag", b"newer") is None
    assert samples(b"", b"usage") == []


def test_labels_may_hold_braces_quotes_and_numbers() -> None:
    ((written, value),) = samples(PAGE, b"last")
    assert value == 3.0
    assert labels(written) == {"a": "{x} 7", "b": '\\"'.join("qu")}


def test_a_page_may_begin_with_a_sample_and_have_no_comments() -> None:
    page = b'n{rank="0"} 1\nm 5\nn{rank="1"} 2\n'
    assert total(page, b"n") == 3.0
    assert count(page, b"m") == 5


@pytest.mark.parametrize("line", [b"n", b"n{} ", b"n is fine", b'n{a="1"} x'])
def test_a_line_without_a_number_is_shown(line: bytes) -> None:
    if line == b"n":
        assert samples(line, b"n") == []
        return
    with pytest.raises(EngineError, match="not Prometheus text: 'n"):
        samples(line, b"n")


# -- rejections by which engines report that a request is too long ----------------------------------------


@pytest.mark.parametrize("name", REJECTIONS)
def test_every_engine_is_understood_and_its_limit_is_read(name: str) -> None:
    status, body, limit = REJECTIONS[name]
    failure = failure_of(status, [], json.dumps(body).encode())
    assert isinstance(failure, TooLongError)
    assert failure.failure is DispatchFailure.TOO_LONG
    assert stated_context_limit(str(failure)) == limit
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
    assert stated_context_limit(message) is None
    for status in (400, 422):
        assert failure_of(status, [], json.dumps({"error": {"message": message}}).encode()) is None


def test_numbers_may_be_written_with_commas() -> None:
    assert (
        stated_context_limit("the maximum context length is 131,072 tokens, you asked for 200,000") == 131_072
    )


def test_a_limit_of_nothing_is_none() -> None:
    assert stated_context_limit("exceeds the available context size (0 tokens)") is None
