"""Spans of requests: a tour over HTTP, a table of records and their spans, and the samplers."""

import re
from itertools import pairwise

import pytest
from msgspec.structs import replace

from serve_app.core.events import DispatchFailure
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PromptShape, RequestSpec, Submission
from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.batches.runner import CollectingExchange
from serve_app.serving.gateway.path import Attempt, Fallbacks, Request
from serve_app.serving.gateway.request_log import concluded, rejected
from serve_app.serving.gateway.tracing.request_trace import RequestTracer, make_tracer
from serve_app.serving.gateway.upstream import UpstreamError

from ..builders import MODEL, Engine, FakeDispatcher, chat, error_json, replies, request_of, streams
from ..fleet import fleet_of
from .collector import CLIENT, ERROR, SERVER, Collector, ReceivedSpan

CHAT = "/v1/chat/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
SECRET = "SECRET-OF-THE-PROMPT"
ANSWER = {
    "id": "chatcmpl-42",
    "choices": [{"index": 0, "finish_reason": "stop", "delta": {"content": SECRET}}],
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "completion_tokens_details": {"reasoning_tokens": 3},
    },
}


def parent_in(lines: bytes) -> tuple[str, ...]:
    """Return the trace, span and flags in a `traceparent`."""
    found = re.search(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})\b", lines.decode())
    assert found is not None
    return found.groups()


async def test_a_stream_is_one_trace_with_its_waits_its_places_and_its_engines(collector: Collector) -> None:
    engine = Engine()
    busy = replies(503, error_json(SECRET, 503))
    engine.answers.extend(
        [busy, streams(ANSWER, 0.08), replies(200, ANSWER), replies(400, error_json(SECRET))]
    )
    headers = {"traceparent": SAMPLED, "tracestate": "a=1,b=2", "x-tenant": "acme", "x-session-id": "talk"}
    body = chat(messages=[{"role": "user", "content": SECRET}], max_tokens=5)
    async with fleet_of([engine], tracing=True) as fleet:
        await fleet.http.post(CHAT, json={**body, "stream": True, "n": 2}, headers=headers)
        for status in (200, 400):
            assert (await fleet.http.post(CHAT, json=body)).status_code == status
    assert not any(b"SECRET" in sent for sent in collector.raw)
    root, whole, _ = collector.named(f"chat {MODEL}")
    assert (root.trace_id, root.parent_id, root.span.kind) == (TRACE, PARENT, SERVER)
    assert root.resource["service.name"] == "ewsjf-gateway"
    attributes = root.attributes
    assert attributes.pop("ewsjf.request_id").startswith("gw")
    assert 0.0 < attributes.pop("gen_ai.response.time_to_first_chunk") < root.seconds
    shared = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ewsjf",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.id": "chatcmpl-42",
        "gen_ai.response.model": MODEL,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.reasoning.output_tokens": 3,
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "ewsjf.class": "default",
        "ewsjf.outcome": "completed",
    }
    own = {"gen_ai.request.stream": True, "gen_ai.request.choice.count": 2, "gen_ai.conversation.id": "talk"}
    assert attributes == {**shared, **own, "ewsjf.tenant": "acme"}
    assert whole.attributes.items() >= shared.items()
    children = sorted((each for each in collector.spans if each.parent_id == root.id), key=began)
    assert [each.name for each in children] == 2 * ["ewsjf.queue", "ewsjf.place", "ewsjf.forward"]
    assert all(child.trace_id == TRACE and child.is_within(root) for child in children)
    for before, after in pairwise(children):
        assert before.span.end_time_unix_nano == after.span.start_time_unix_nano
    first, last = children[2], children[5]
    assert (last.span.kind, last.seconds >= 0.08) == (CLIENT, True)
    assert last.attributes.items() >= {"ewsjf.replica": "s0", "server.address": "127.0.0.1"}.items()
    received = [parent_in(head[b"traceparent"]) for head in engine.heads[:2]]
    assert received == [(TRACE, each.id, "01") for each in (first, last)]
    assert engine.heads[0][b"tracestate"] == b"a=1,b=2"


def new_tracer() -> RequestTracer:
    made = make_tracer("g1")
    assert made is not None
    return made


def begin(tracer: RequestTracer, *headers: tuple[bytes, bytes], path: str = CHAT) -> Request:
    """Return a request that arrived at 0 s, with its trace if it is sampled."""
    request = request_of(CollectingExchange(path, SECRET.encode(), headers))
    tracer.begin(request)
    return request


def reject(request: Request) -> None:
    rejection = RequestRejected(Outcome.REJECTED_INVALID, SECRET)
    request.reject(rejection)
    record = rejected(request, request.path, rejection)
    assert request.trace is not None
    request.trace.end(request, record, record.shown_status)


def serve(request: Request, ends: str, outcome: str, status: int) -> None:
    """Submit a request at 1 s, grant it at 4 and 8 s, a second after the dispatch, and end it at 20 s.

    Args:
        ends: failures and outcomes of its attempts; after an outcome it is submitted to another model.
    """
    assert request.trace is not None
    spec = RequestSpec(model=MODEL, shape=PromptShape(text_bytes=9))
    request.submission, request.submitted_at = Submission(request_id="g-1", spec=spec), 1.0
    for granted_at, end in zip((4.0, 8.0), ends.split(), strict=False):
        if request.attempt is not None and request.attempt.failure is None:
            request.fallbacks = Fallbacks("route", (), None)
            request.fallbacks.earlier.append(request.submitted_at)
            request.submitted_at = granted_at - 1.0
        dispatch, address = FakeDispatcher([]).granted("g-1", 1)
        dispatch = replace(dispatch, queue_wait_s=granted_at - 1.0 - request.submitted_at)
        attempt = request.attempt = Attempt(dispatch, address, granted_at)
        request.attempts.append(attempt)
        attempt.trace_lines = request.trace.begin_attempt(request, attempt)
        attempt.ended_at = granted_at + 2.0
        if end in list(Outcome):
            attempt.outcome = Outcome(end)
        else:
            attempt.failure = UpstreamError(DispatchFailure(end), SECRET)
    request.conclusion, request.exchange.status = Conclusion(Outcome(outcome), SECRET), status
    if status == 200:
        request.first_token_at = request.attempts[-1].granted_at + 1.0
    record = replace(concluded(request), finished_at=20.0)
    request.trace.end(request, record, record.shown_status)


def began(span: ReceivedSpan) -> int:
    return int(span.span.start_time_unix_nano)


def shown(span: ReceivedSpan, root: ReceivedSpan) -> str:
    """Return the name, the times, the end and the status of a span."""
    bounds = (span.span.start_time_unix_nano, span.span.end_time_unix_nano)
    times = "-".join(f"{(at - root.span.start_time_unix_nano) / 1e9:g}" for at in bounds)
    words = [span.attributes.get(name, "") for name in ("ewsjf.put_back", "ewsjf.outcome", "error.type")]
    status = "ERROR" if span.span.status.code == ERROR else ""
    return " ".join(filter(None, (span.name.removeprefix("ewsjf."), times, *words, status)))


# Of each record, its attempts, outcome, status (0 for none) and events, and then its spans.
RECORDS = """\
completed | completed | 200 | queued dispatched first_chunk
chat tiny 0-20 completed, queue 1-3, place 3-4, forward 4-6 completed
busy completed | completed | 200 | queued dispatched put_back dispatched first_chunk
chat tiny 0-20 completed, queue 1-3, place 3-4, forward 4-6 busy busy ERROR, \
queue 6-7, place 7-8, forward 8-10 completed
revoked completed | completed | 200 | queued dispatched put_back dispatched first_chunk
chat tiny 0-20 completed, queue 1-3, place 3-4, forward 4-6 revoked, \
queue 6-7, place 7-8, forward 8-10 completed
failed completed | completed | 200 | queued dispatched queued dispatched first_chunk
chat tiny 0-20 completed, queue 1-3, place 3-4, forward 4-6 failed ERROR, \
queue 7-7, place 7-8, forward 8-10 completed
engine_error failed | failed | 500 | queued dispatched put_back dispatched
chat tiny 0-20 failed failed ERROR, queue 1-3, place 3-4, forward 4-6 engine_error engine_error ERROR, \
queue 6-7, place 7-8, forward 8-10 failed ERROR
failed | failed | 200 | queued dispatched first_chunk
chat tiny 0-20 failed failed ERROR, queue 1-3, place 3-4, forward 4-6 failed ERROR
cancelled | cancelled | 200 | queued dispatched first_chunk
chat tiny 0-20 cancelled cancelled, queue 1-3, place 3-4, forward 4-6 cancelled
busy | cancelled | 0 | queued dispatched put_back
chat tiny 0-20 cancelled cancelled, queue 1-3, place 3-4, forward 4-6 busy busy ERROR, queue 6-20 cancelled
 | cancelled | 0 | queued
chat tiny 0-20 cancelled cancelled, queue 1-20 cancelled
 | expired | 504 | queued
chat tiny 0-20 expired expired ERROR, queue 1-20 expired""".splitlines()


@pytest.mark.parametrize(
    ("record", "expected"), [*zip(RECORDS[::2], RECORDS[1::2], strict=True)], ids=RECORDS[::2]
)
def test_spans_follow_from_the_record_of_a_request(collector: Collector, record: str, expected: str) -> None:
    ends, outcome, status, events = record.split("|")
    tracer = new_tracer()
    request = begin(tracer)
    serve(request, ends, outcome.strip(), int(status))
    tracer.close(5.0)

    root, *children = spans = sorted(collector.spans, key=began)
    assert ", ".join(shown(each, root) for each in spans) == expected
    assert {(each.trace_id, each.parent_id) for each in children} == {(root.trace_id, root.id)}
    assert (root.parent_id, root.span.status.message) == ("", "")
    assert [each.name.removeprefix("ewsjf.") for each in root.span.events] == events.split()
    assert root.attributes["http.response.status_code"] == (int(status) or 499)
    assert root.attributes.get("gen_ai.response.time_to_first_chunk") == request.first_token_at
    assert request.trace is not None
    assert request.trace.trace_id == root.trace_id
    attempts = [(each.id, each.attributes["ewsjf.attempt"]) for each in collector.named("ewsjf.forward")]
    assert attempts == [
        (parent_in(each.trace_lines)[1], n) for n, each in enumerate(request.attempts, start=1)
    ]
    assert not any(b"SECRET" in body for body in collector.raw)


def test_a_rejected_request_is_one_span_of_the_service_that_the_environment_names(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-llms")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    tracer = new_tracer()
    assert begin(tracer, path="/v1/models").trace is None
    reject(begin(tracer, path="/v1/completions"))
    tracer.close(5.0)

    (root,) = collector.spans
    assert (root.name, root.span.status.code) == ("text_completion", 0)
    assert root.attributes["http.response.status_code"] == 400
    assert root.attributes["error.type"] == "rejected_invalid"
    named = {"service.name": "my-llms", "deployment.environment": "test", "service.instance.id": "g1"}
    assert root.resource.items() >= named.items()


@pytest.mark.parametrize(
    ("tracing", "ratio", "given", "expected"),
    [
        (True, "1", UNSAMPLED, UNSAMPLED),
        # Without a parent, the engine would begin its own trace.
        (True, "0", "", "00-[0-9a-f]{32}-[0-9a-f]{16}-00"),
        (False, "1", SAMPLED, SAMPLED),
        (False, "1", "", ""),
    ],
)
async def test_without_spans_an_engine_receives_the_clients_parent_or_an_unsampled_one(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    tracing: bool,
    ratio: str,
    given: str,
    expected: str,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    engine = Engine()
    async with fleet_of([engine], tracing=tracing) as fleet:
        headers = {"traceparent": given, "tracestate": "a=1"} if given else {}
        await fleet.http.post(CHAT, json=chat(), headers=headers)
    assert re.fullmatch(expected, engine.heads[0].get(b"traceparent", b"").decode())
    assert engine.heads[0].get(b"tracestate") == (b"a=1" if given else None)
    assert collector.spans == []


def test_a_share_of_requests_is_sampled_by_the_id_that_their_spans_have(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    tracer = new_tracer()
    traced = [request for request in (begin(tracer) for _ in range(400)) if request.trace is not None]
    for request in traced:
        reject(request)
    tracer.close(5.0)
    ids = {each.trace_id for each in collector.spans}
    assert 150 < len(traced) == len(ids) < 250
    assert all(int(trace_id, 16) & (2**64 - 1) < 2**63 for trace_id in ids)


@pytest.mark.parametrize(
    ("sampler", "argument", "expected"),
    [
        # Without a parent, with an unsampled parent, and with a sampled one.
        ("always_on", "", (True, True, True)),
        ("always_off", "", (False, False, False)),
        ("traceidratio", "1", (True, True, True)),
        ("traceidratio", "0", (False, False, False)),
        ("parentbased_always_on", "", (True, False, True)),
        ("parentbased_always_off", "", (False, False, True)),
        ("parentbased_traceidratio", "1", (True, False, True)),
        ("parentbased_traceidratio", "0", (False, False, True)),
        # Unknown values behave as in OpenTelemetry.
        ("carrier-pigeon", "", (True, False, True)),
        ("traceidratio", "many", (True, True, True)),
    ],
)
def test_every_sampler_of_the_environment_decides_as_in_opentelemetry(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, expected: object
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    tracer = new_tracer()
    parents = [(b"traceparent", each.encode()) for each in (UNSAMPLED, SAMPLED)]
    requests = begin(tracer), begin(tracer, parents[0]), begin(tracer, parents[1])
    tracer.close(1.0)
    assert tuple(request.trace is not None for request in requests) == expected


def test_an_invalid_trace_state_fails_no_request(collector: Collector) -> None:
    many = ",".join(f"k{number}=v" for number in range(60))
    tracer = new_tracer()
    for state in ("", ",,,", "no-equals-sign", "a=" + "x" * 5_000, many, "a=1,a=2,A=3", "a=\xe4\xf6"):
        states = [(b"tracestate", value) for value in (state.encode("latin-1"), b"b=2")]
        request = begin(tracer, (b"traceparent", SAMPLED.encode()), *states)
        serve(request, "completed", "completed", 200)
        trace_id, _, flags = parent_in(request.attempts[0].trace_lines)
        assert (trace_id, flags) == (TRACE, "01"), state
    tracer.close(5.0)
    assert {each.trace_id for each in collector.spans} == {TRACE}
