from collections import Counter

import pytest

from experiments.common.errors import ExperimentError
from experiments.common.load_test.open_loop import BodyFactory, BodySettings, OpenLoop, all_completed
from serve_app.core.metrics.record import RequestRecord
from serve_app.errors import Outcome
from serve_app.lab.workloads import Trace, TraceRequest
from tests.experiments.load_test.scripted import (
    Script,
    document,
    raw,
    role_event,
    scripted,
    silence,
    stream_of,
    streaming,
    then_closed,
    token_event,
)


def trace(*arrivals_s: float) -> Trace:
    requests = tuple(TraceRequest(arrival_s=at, prompt_tokens=20, output_tokens=3) for at in arrivals_s)
    return Trace(name="t", source="made for a test", requests=requests)


async def drive(url: str, of: Trace, timeout_s: float = 600.0) -> list[RequestRecord]:
    return await OpenLoop(url, BodyFactory(BodySettings(model="m")), timeout_s).run(of)


async def test_a_record_has_counts_times_and_the_gateways_headers() -> None:
    headers = b"x-pool: short\r\nx-replica: r1\r\nx-queue-wait-ms: 12.5\r\n"
    headers += b"x-length-queue: q0\r\nx-estimated-tokens: 31\r\n"
    async with scripted(streaming(stream_of(20, 3), headers=headers)) as server:
        records = await drive(server.url, trace(0.0))
    (record,) = records
    assert record.completed
    assert (record.prompt_tokens, record.output_tokens, record.estimated_tokens) == (20, 3, 31)
    assert (record.pool, record.replica, record.length_queue) == ("short", "r1", "q0")
    assert record.sent_at is not None
    assert record.first_token_at is not None
    assert record.dispatched_at == pytest.approx(record.sent_at + 0.0125)
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
