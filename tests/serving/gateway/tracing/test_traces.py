"""Exported spans of requests: a gateway over HTTP, a live scheduler and engines."""

import asyncio
import re
from typing import Any

import pytest

from serve_app.core.events import Arrived
from serve_app.engines.engine import Scope, Send
from serve_app.serving.gateway.batches.runner import CollectingExchange
from serve_app.serving.gateway.tracing.request_trace import make_tracer
from tests.serving.channel.harness import wait_until

from ..builders import (
    MODEL,
    Engine,
    chat,
    error_json,
    replies,
    reply_json,
    request_of,
    streams,
    usage_json,
)
from ..fleet import fleet_of
from .collector import CLIENT, ERROR, SERVER, Collector

CHAT = "/v1/chat/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ROOT = f"chat {MODEL}"
TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def received_parent(engine: Engine, number: int = -1) -> tuple[str, str, str]:
    """Return the trace, span and flags that an engine received."""
    found = TRACEPARENT.fullmatch(engine.heads[number][b"traceparent"].decode())
    assert found is not None
    return found[1], found[2], found[3]


async def spans_of(collector: Collector, count: int) -> None:
    await wait_until(lambda: len(collector.spans) >= count)
    await asyncio.sleep(0.1)
    assert len(collector.spans) == count, [each.name for each in collector.spans]


async def test_a_stream_is_one_trace_with_its_wait_its_place_and_its_engine(collector: Collector) -> None:
    engine = Engine(token_delay_s=0.02)
    async with fleet_of([engine], tracing=True) as fleet:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1,b=2", "x-tenant": "acme"}
        headers["x-session-id"] = "talk"
        body = chat(stream=True, max_tokens=5, n=2)
        answer = await fleet.http.post(CHAT, json=body, headers=headers)
        assert answer.status_code == 200
        await spans_of(collector, 4)
    root = collector.only(ROOT)
    assert (root.trace_id, root.parent_id, root.span.kind) == (TRACE, PARENT, SERVER)
    assert root.resource["service.name"] == "ewsjf-gateway"
    attributes = root.attributes
    assert attributes.pop("ewsjf.request_id").startswith("gw")
    assert 0.0 < attributes.pop("gen_ai.response.time_to_first_chunk") < root.seconds
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ewsjf",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.conversation.id": "talk",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.id": "x",
        "gen_ai.response.model": MODEL,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "ewsjf.class": "default",
        "ewsjf.tenant": "acme",
        "ewsjf.outcome": "completed",
    }
    events = ["ewsjf.queued", "ewsjf.dispatched", "ewsjf.first_chunk"]
    assert [event.name for event in root.span.events] == events
    children = [collector.only(name) for name in ("ewsjf.queue", "ewsjf.place", "ewsjf.forward")]
    for child in children:
        assert (child.trace_id, child.parent_id) == (TRACE, root.id)
        assert child.is_within(root)
    queue, place, forward = children
    assert queue.span.end_time_unix_nano == place.span.start_time_unix_nano
    assert place.span.end_time_unix_nano == forward.span.start_time_unix_nano
    assert forward.seconds >= 0.08
    assert forward.span.kind == CLIENT
    assert forward.attributes["ewsjf.replica"] == "s0"
    assert forward.attributes["ewsjf.attempt"] == 1
    assert forward.attributes["server.address"] == "127.0.0.1"
    assert received_parent(engine) == (TRACE, forward.id, "01")
    assert engine.heads[0][b"tracestate"] == b"a=1,b=2"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_span_has_the_answers_id_and_its_reasoning_tokens(collector: Collector, stream: bool) -> None:
    usage = {**usage_json(7, 5), "completion_tokens_details": {"reasoning_tokens": 3}}
    choice = {"index": 0, "finish_reason": "stop", "delta" if stream else "message": {"content": "four"}}
    document = {"id": "chatcmpl-42", "model": MODEL, "choices": [choice], "usage": usage}
    engine = Engine()
    engine.answers.append(streams(document) if stream else replies(200, document))
    async with fleet_of([engine], tracing=True) as fleet:
        answer = await fleet.http.post(CHAT, json=chat(stream=stream))
        assert answer.status_code == 200
        await spans_of(collector, 4)
    attributes = collector.only(ROOT).attributes
    assert attributes["gen_ai.response.id"] == "chatcmpl-42"
    assert attributes["gen_ai.usage.reasoning.output_tokens"] == 3


async def test_nothing_that_anybody_wrote_is_in_a_span(collector: Collector) -> None:
    async def fail(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await reply_json(send, 400, error_json("cannot read SECRET-OF-THE-PROMPT"))

    engine = Engine()
    engine.answers.append(fail)
    async with fleet_of([engine], tracing=True) as fleet:
        for _ in range(2):
            content = [{"role": "user", "content": "SECRET-OF-THE-PROMPT"}]
            await fleet.http.post(CHAT, json=chat(messages=content, user="someone"))
        await spans_of(collector, 8)
    assert all(b"SECRET" not in body and b"word" not in body for body in collector.raw)


class Busy(Engine):
    """Engine that rejects its first request, as one without capacity does."""

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        if len(self.bodies) == 1:
            await reply_json(send, 503, error_json("no room", 503))
            return
        await super()._answer(scope, body, send)


async def test_a_put_back_shows_as_an_attempt_that_failed_and_a_second_wait(collector: Collector) -> None:
    engine = Busy()
    async with fleet_of([engine], tracing=True) as fleet:
        answer = await fleet.http.post(CHAT, json=chat())
        assert answer.status_code == 200
        await spans_of(collector, 7)
    root = collector.only(ROOT)
    first, second = collector.named("ewsjf.forward")
    assert first.attributes["ewsjf.put_back"] == first.attributes["error.type"] == "busy"
    assert first.span.status.code == ERROR
    assert second.attributes["ewsjf.attempt"] == 2
    assert second.attributes["ewsjf.outcome"] == "completed"
    events = [event.name for event in root.span.events]
    assert events == ["ewsjf.queued", "ewsjf.dispatched", "ewsjf.put_back", "ewsjf.dispatched"]
    waits = collector.named("ewsjf.queue")
    assert len(waits) == len(collector.named("ewsjf.place")) == 2
    assert waits[1].span.start_time_unix_nano >= first.span.start_time_unix_nano
    assert {each.parent_id for each in (first, second, *waits)} == {root.id}
    # Each attempt is the parent of the engine's span.
    assert [received_parent(engine, number)[1] for number in (0, 1)] == [first.id, second.id]
    assert root.parent_id == ""
    assert root.span.status.code == 0


async def test_a_revocation_shows_as_an_attempt_without_an_error(collector: Collector) -> None:
    engine = Engine(token_delay_s=0.02)
    async with fleet_of([engine], tracing=True) as fleet:
        arrivals = fleet.control_plane.events(Arrived)
        pending = fleet.http.post(CHAT, json=chat(max_tokens=20), headers={"x-priority": "batch"})
        request = asyncio.create_task(pending)
        await wait_until(lambda: engine.running)
        fleet.control_plane.revoke(arrivals[0].request.request_id, "s0")
        assert (await request).status_code == 200
        await spans_of(collector, 7)
    first, second = collector.named("ewsjf.forward")
    assert first.attributes["ewsjf.put_back"] == "revoked"
    assert "error.type" not in first.attributes
    assert first.span.status.code == 0
    assert second.attributes["ewsjf.attempt"] == 2


async def test_a_client_that_leaves_ends_its_trace(collector: Collector) -> None:
    engine = Engine(token_delay_s=0.05)
    async with fleet_of([engine], tracing=True) as fleet:
        async with fleet.http.stream("POST", CHAT, json=chat(stream=True, max_tokens=200)) as answer:
            await anext(answer.aiter_bytes())
        await spans_of(collector, 4)
    root = collector.only(ROOT)
    assert root.attributes["ewsjf.outcome"] == root.attributes["error.type"] == "cancelled"
    assert root.attributes["http.response.status_code"] == 200
    assert root.span.status.code == 0
    assert collector.only("ewsjf.forward").attributes["ewsjf.outcome"] == "cancelled"


async def test_a_client_that_leaves_the_queue_shows_only_its_wait(collector: Collector) -> None:
    async with fleet_of([], tracing=True) as fleet:
        waiting = asyncio.create_task(fleet.http.post(CHAT, json=chat()))
        await wait_until(lambda: fleet.gateway.open_requests)
        waiting.cancel()
        await spans_of(collector, 2)
    assert collector.only(ROOT).attributes["http.response.status_code"] == 499
    assert collector.only("ewsjf.queue").attributes == {"ewsjf.outcome": "cancelled"}


async def test_a_rejected_request_is_a_trace_of_one_span(collector: Collector) -> None:
    async with fleet_of([Engine()], tracing=True) as fleet:
        assert (await fleet.http.post(CHAT, json=chat(max_tokens="many"))).status_code == 400
        assert (await fleet.http.get("/v1/models")).status_code == 200
        await spans_of(collector, 1)
    attributes = collector.only("chat").attributes
    assert attributes["http.response.status_code"] == 400
    assert attributes["error.type"] == "rejected_invalid"
    assert collector.only("chat").span.status.code == 0


async def test_an_engine_that_fails_makes_the_trace_an_error(collector: Collector) -> None:
    async def fail(scope: Scope, parsed: dict[str, Any], send: Send) -> None:
        await reply_json(send, 500, error_json("broken", 500))

    engine = Engine()
    engine.answers.extend([fail, fail])
    async with fleet_of([engine], tracing=True) as fleet:
        answer = await fleet.http.post(CHAT, json=chat())
        assert answer.status_code == 500
        await spans_of(collector, 7)
    root = collector.only(ROOT)
    assert root.span.status.code == ERROR
    assert root.span.status.message == ""
    assert root.attributes["error.type"] == "failed"


async def test_a_client_that_does_not_sample_decides_for_all(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    engine = Engine()
    given = f"00-{TRACE}-{PARENT}-00"
    async with fleet_of([engine], tracing=True) as fleet:
        await fleet.http.post(CHAT, json=chat(), headers={"traceparent": given, "tracestate": "a=1"})
    assert engine.heads[0][b"traceparent"] == given.encode()
    assert engine.heads[0][b"tracestate"] == b"a=1"
    assert collector.spans == []


async def test_a_request_that_is_not_sampled_is_not_sampled_by_its_engine(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    engine = Engine()
    async with fleet_of([engine], tracing=True) as fleet:
        await fleet.http.post(CHAT, json=chat())
        assert received_parent(engine)[2] == "00"
    assert collector.spans == []


async def test_a_share_of_requests_is_sampled_by_the_id_that_their_spans_have(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    engine = Engine()
    async with fleet_of([engine], tracing=True) as fleet:
        for _ in range(40):
            await fleet.http.post(CHAT, json=chat())
        sampled = [
            received_parent(engine, number)[0]
            for number in range(40)
            if received_parent(engine, number)[2] != "00"
        ]
        assert 5 < len(sampled) < 35
        await spans_of(collector, 4 * len(sampled))
    assert {each.trace_id for each in collector.named(ROOT)} == set(sampled)
    assert all(int(trace_id, 16) & (2**64 - 1) < 2**63 for trace_id in sampled)


@pytest.mark.parametrize(
    ("sampler", "argument", "without", "unsampled_parent", "sampled_parent"),
    [
        ("always_on", "", True, True, True),
        ("always_off", "", False, False, False),
        ("traceidratio", "1", True, True, True),
        ("traceidratio", "0", False, False, False),
        ("parentbased_always_on", "", True, False, True),
        ("parentbased_always_off", "", False, False, True),
        ("parentbased_traceidratio", "1", True, False, True),
        ("parentbased_traceidratio", "0", False, False, True),
        # Unknown values behave as in OpenTelemetry.
        ("carrier-pigeon", "", True, False, True),
        ("traceidratio", "many", True, True, True),
    ],
)
async def test_every_sampler_of_the_environment_decides_as_in_opentelemetry(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    argument: str,
    without: bool,
    unsampled_parent: bool,
    sampled_parent: bool,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    tracer = make_tracer("g1")
    assert tracer is not None
    for flags, is_sampled in ((None, without), ("00", unsampled_parent), ("01", sampled_parent)):
        headers = [] if flags is None else [(b"traceparent", f"00-{TRACE}-{PARENT}-{flags}".encode())]
        request = request_of(CollectingExchange(CHAT, b"", headers))
        tracer.begin(request)
        assert (request.trace is not None) == is_sampled, flags
        assert request.trace is None or request.trace.trace_id
    tracer.close(1.0)


async def test_without_tracing_the_clients_trace_is_forwarded_unchanged(collector: Collector) -> None:
    engine = Engine()
    given = f"00-{TRACE}-{PARENT}-01"
    async with fleet_of([engine]) as fleet:
        await fleet.http.post(CHAT, json=chat(), headers={"traceparent": given})
        await fleet.http.post(CHAT, json=chat())
    assert engine.heads[0][b"traceparent"] == given.encode()
    assert b"traceparent" not in engine.heads[1]
    assert collector.spans == []


async def test_the_environment_names_the_service(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-llms")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    async with fleet_of([Engine()], tracing=True) as fleet:
        await fleet.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        await spans_of(collector, 4)
    resource = collector.only(f"text_completion {MODEL}").resource
    assert resource["service.name"] == "my-llms"
    assert resource["deployment.environment"] == "test"
    assert resource["service.instance.id"].startswith("gw")


async def test_an_invalid_trace_state_fails_no_request(collector: Collector) -> None:
    states = (
        "",
        ",,,",
        "no-equals-sign",
        "a=" + "x" * 5_000,
        ",".join(f"k{number}=v" for number in range(60)),
        "a=1,a=2,A=3",
        "a=\xe4\xf6",
    )
    engine = Engine()
    async with fleet_of([engine], tracing=True) as fleet:
        for state in states:
            headers = [
                ("traceparent", f"00-{TRACE}-{PARENT}-01"),
                ("tracestate", state),
                ("tracestate", "b=2"),
            ]
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            answer = await fleet.http.post(CHAT, json=chat(), headers=raw)
            assert answer.status_code == 200, state
            assert received_parent(engine)[2] == "01", state
        await spans_of(collector, 4 * len(states))
    assert {root.trace_id for root in collector.named(ROOT)} == {TRACE}
