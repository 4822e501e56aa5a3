"""The load test: its open loop, the bodies it sends, and the responses it reads."""

import json
from collections import Counter

import pytest

from experiments.common.errors import ExperimentError
from experiments.common.load_test.open_loop import (
    ApiEndpoint,
    BodyFactory,
    BodyKind,
    BodySettings,
    OpenLoop,
    all_completed,
)
from experiments.common.load_test.response import ResponseParser
from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome
from serve_app.lab.workloads import PREFIX_BLOCK_TOKENS, Trace, TraceRequest
from serve_app.request import PriorityClass
from tests.experiments.scripted import (
    DONE,
    Script,
    document,
    event,
    raw,
    role_event,
    scripted,
    silence,
    stream_of,
    streaming,
    then_closed,
    token_event,
    usage_event,
)


def trace(*arrivals_s: float) -> Trace:
    requests = tuple(TraceRequest(arrival_s=at, prompt_tokens=20, output_tokens=3) for at in arrivals_s)
    return Trace(name="t", source="made for a test", requests=requests)


async def drive(url: str, of: Trace, timeout_s: float = 600.0) -> list[RequestRecord]:
    return await OpenLoop(url, BodyFactory(BodySettings(model="m")), timeout_s).run(of)


async def test_a_record_has_counts_and_times() -> None:
    async with scripted(streaming(stream_of(20, 3))) as server:
        records = await drive(server.url, trace(0.0))
    (record,) = records
    assert record.completed
    assert (record.prompt_tokens, record.output_tokens) == (20, 3)
    assert record.sent_at is not None
    assert record.first_token_at is not None
    assert record.arrived_at <= record.sent_at <= record.first_token_at <= record.finished_at


async def test_every_request_ends_in_one_record_whatever_the_endpoint_does() -> None:
    scripts: list[tuple[Script, Outcome]] = [
        (streaming(stream_of()), Outcome.COMPLETED),
        (document(429, {"error": {"message": "full", "code": "queue_full"}}), Outcome.REJECTED_QUEUE_FULL),
        (then_closed(streaming([role_event(), token_event()], end=b"")), Outcome.FAILED),
        (streaming([role_event(), token_event()]), Outcome.FAILED),
        (raw(b"SSH-2.0-OpenSSH\r\n\r\n"), Outcome.FAILED),
        (then_closed(raw(b"")), Outcome.FAILED),
        (silence, Outcome.CANCELLED),
        (streaming(stream_of()), Outcome.COMPLETED),
    ]
    async with scripted(*[script for script, _ in scripts]) as server:
        # Far enough apart that the n-th request gets the n-th script.
        records = await drive(server.url, trace(*[0.05 * place for place in range(8)]), timeout_s=0.5)
    ended = {record.request_id: record.outcome for record in records}
    assert len(records) == len(ended) == 8
    assert ended == {f"bench-{place}": outcome for place, (_, outcome) in enumerate(scripts)}


async def test_connections_are_kept_alive_and_reused() -> None:
    async with scripted(streaming(stream_of())) as server:
        records = await drive(server.url, trace(*[0.02 * place for place in range(10)]))
    assert Counter(record.outcome for record in records) == {Outcome.COMPLETED: 10}
    assert server.connections < 10


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    closing = then_closed(streaming(stream_of(), headers=b"connection: close\r\n"))
    async with scripted(closing) as server:
        records = await drive(server.url, trace(*[0.02 * place for place in range(5)]))
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    assert server.connections == 5


async def test_arrivals_do_not_wait_for_answers() -> None:
    async with scripted(silence) as server:
        records = await drive(server.url, trace(*[0.0] * 20), timeout_s=3.0)
        assert len(server.heads) == 20
    assert len(records) == 20


async def test_an_endpoint_that_is_not_there_fails_every_request() -> None:
    async with scripted(silence) as server:
        url = server.url
    records = await drive(url, trace(0.0, 0.0))
    assert [record.outcome for record in records] == [Outcome.FAILED] * 2
    assert "cannot connect" in records[0].detail


async def test_an_answer_without_usage_has_the_length_in_the_trace() -> None:
    without = [role_event(), token_event(), b"data: [DONE]\n\n"]
    async with scripted(streaming(stream_of(20, 2)), streaming(without)) as server:
        records = await drive(server.url, trace(0.0, 0.1))
    assert [record.output_tokens for record in records] == [2, 3]


async def test_a_measurement_with_a_failed_request_is_rejected_with_its_reason() -> None:
    async with scripted(streaming(stream_of()), streaming([role_event()])) as server:
        records = await drive(server.url, trace(0.0, 0.1))
    assert all_completed(records[:1]) == records[:1]
    with pytest.raises(ExperimentError, match=r"1 requests did not complete, the first: .*without \[DONE\]"):
        all_completed(records)


# -- bodies -----------------------------------------------------------------------------------------------


def request(prompt_tokens: int = 100, **changes: object) -> TraceRequest:
    fields = {"arrival_s": 0.0, "prompt_tokens": prompt_tokens, "output_tokens": 7, **changes}
    return TraceRequest(**fields)  # type: ignore[arg-type]  # the fields are those of a request


def sent(factory: BodyFactory, number: int, of: TraceRequest) -> tuple[dict[str, str], dict[str, object]]:
    return factory.headers(number, of), json.loads(factory.body(number, of))


def test_an_emulated_body_states_exact_counts_and_requests_usage() -> None:
    headers, body = sent(BodyFactory(BodySettings(model="m")), 4, request(100))
    assert headers["x-request-id"] == "bench-4"
    assert (body["ewsjf_prompt_tokens"], body["ewsjf_output_tokens"], body["max_tokens"]) == (100, 7, 7)
    assert body["stream_options"] == {"include_usage": True}


def test_a_text_body_has_no_fields_of_ours() -> None:
    settings = BodySettings(model="m", kind=BodyKind.TEXT, ignore_eos=True)
    _, body = sent(BodyFactory(settings), 1, request())
    assert set(body) == {"model", "stream", "stream_options", "ignore_eos", "max_tokens", "messages"}


@pytest.mark.parametrize(("stated", "expected"), [(None, 7), (500, 500), (0, None)])
def test_clients_state_the_true_length_or_another_or_none(stated: int | None, expected: int | None) -> None:
    _, body = sent(BodyFactory(BodySettings(model="m", max_tokens=stated)), 1, request())
    assert body.get("max_tokens") == expected


def test_the_engines_count_of_cached_tokens_is_read() -> None:
    parser = ResponseParser(status=200, first_token_at=1.0)
    usage = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}
    parser.on_body(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode(), 2.0)
    parser.on_body(b"data: [DONE]\n\n", 2.0)
    parser.on_complete(2.0)
    assert (parser.prompt_tokens, parser.cached_tokens, parser.output_tokens) == (40, 32, 3)


@pytest.mark.parametrize("prompt_tokens", [1, 2, 3, 50, 5000, 400_000])
def test_the_text_has_the_requested_size(prompt_tokens: int) -> None:
    factory = BodyFactory(BodySettings(model="m"))
    assert len(factory.text(3, request(prompt_tokens))) == prompt_tokens * 5


def test_no_two_prompts_begin_alike() -> None:
    factory = BodyFactory(BodySettings(model="m"))
    beginnings = {factory.text(number, request(100))[:20] for number in range(5000)}
    assert len(beginnings) == 5000


def test_prompts_share_the_blocks_in_the_trace_and_state_no_length() -> None:
    factory = BodyFactory(BodySettings(model="m"))
    block_bytes = PREFIX_BLOCK_TOKENS * 5
    first = factory.text(1, request(1100, prefix=(0, 5)))
    second = factory.text(2, request(1100, prefix=(0, 6)))
    assert first[:block_bytes] == second[:block_bytes]
    assert first[block_bytes : 2 * block_bytes] != second[block_bytes : 2 * block_bytes]
    assert len(first) == 5500
    assert len(factory.text(1, request(100, prefix=(0,)))) == 500
    _, body = sent(factory, 1, request(1100, prefix=(0, 5)))
    assert "ewsjf_prompt_tokens" not in body


def test_tenant_and_class_travel_as_headers() -> None:
    factory = BodyFactory(BodySettings(model="m", endpoint=ApiEndpoint.COMPLETIONS))
    headers, body = sent(factory, 1, request(tenant="search", priority=PriorityClass.BATCH))
    assert factory.path == "/v1/completions"
    assert (headers["x-tenant"], headers["x-priority"]) == ("search", "batch")
    assert isinstance(body["prompt"], str)
    plain, _ = sent(factory, 1, request())
    assert "x-tenant" not in plain
    assert "x-priority" not in plain


def test_settings_that_cannot_work_are_rejected() -> None:
    with pytest.raises(ValueError, match="max_tokens must not be negative, got -1"):
        BodySettings(model="m", max_tokens=-1)
    with pytest.raises(ValueError, match="ignore_eos is for real engines"):
        BodySettings(model="m", ignore_eos=True)


# -- responses --------------------------------------------------------------------------------------------


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
