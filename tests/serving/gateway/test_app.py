"""Gateway routes with OpenAI's SDK and plain HTTP, over real sockets."""

import json
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.errors import Outcome, SettingsError
from serve_app.request import PriorityClass, TurnEnd, Usage
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel

from .builders import MODEL, TOKEN, chat, replies
from .conftest import GatewayHarness, running_gateway

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


async def test_a_chat_completion_has_usage_and_scheduling_headers(harness: GatewayHarness) -> None:
    raw = await harness.sdk.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, extra_headers={"x-request-id": "mine-1"}
    )
    answer = raw.parse()
    assert answer.choices[0].message.content == "w0 w1 w2"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert {name: raw.headers[name] for name in SCHEDULING} == SCHEDULING
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-replica"].startswith("r")
    assert raw.headers["x-engine"] == "yes"
    assert "server" not in raw.headers
    assert harness.dispatcher.events[-1] == (
        "finished",
        Outcome.COMPLETED,
        Usage(prompt_tokens=7, output_tokens=3, ending=TurnEnd.DONE),
    )
    assert not harness.dispatcher.in_flight


SCHEDULING = {
    "x-queue-wait-ms": "12.5",
    "x-pool": "short",
    "x-length-queue": "0-256",
    "x-estimated-tokens": "123",
}


async def test_the_engine_receives_the_clients_bytes_and_few_of_its_headers(harness: GatewayHarness) -> None:
    body = b'{ "messages": [],\n"model" : "tiny", "unknown": [1.50, "\\u00e9"] }'
    head = {"x-request-id": "id-1", "traceparent": "00-1", **dict.fromkeys(FOR_THE_GATEWAY, "mine")}
    answer = await harness.http.post(CHAT, content=body, headers=head)
    assert answer.status_code == 200
    assert harness.engine.bodies == [body]
    seen = harness.engine.heads[0]
    assert seen[b"x-replica-token"] == TOKEN.encode()
    assert seen[b"x-request-id"].decode() == harness.dispatcher.submissions[0].request_id
    assert answer.headers["x-request-id"] == "id-1"
    assert seen[b"traceparent"] == b"00-1"
    assert seen.keys() <= {b"traceparent", b"content-type", b"accept", b"user-agent"} | WRITTEN_BY_THE_GATEWAY


WRITTEN_BY_THE_GATEWAY = {b"host", b"content-length", b"x-replica-token", b"x-request-id"}
FOR_THE_GATEWAY = (
    "authorization",
    "cookie",
    "x-api-key",
    "x-forwarded-for",
    "forwarded",
    "x-tenant",
    "x-data-parallel-rank",
    "x-replica-token",
    "openai-organization",
)


async def test_two_requests_of_one_id_have_two_at_the_engine(harness: GatewayHarness) -> None:
    answers = [await harness.http.post(CHAT, json=chat(), headers={"x-request-id": "same"}) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    assert len({head[b"x-request-id"] for head in harness.engine.heads}) == 2


async def test_a_stream_has_its_usage_read_and_hidden(harness: GatewayHarness) -> None:
    stream = await harness.sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "w0 w1 w2 w3 w4 "
    assert all(chunk.usage is None for chunk in chunks)
    assert json.loads(harness.engine.bodies[0])["stream_options"] == {"include_usage": True}
    assert harness.dispatcher.names() == ["acquire", "first_token", "finished"]
    assert harness.dispatcher.events[-1][2] == Usage(prompt_tokens=7, output_tokens=5, ending=TurnEnd.DONE)


async def test_a_client_that_requests_usage_gets_it_and_its_body_is_unchanged(
    harness: GatewayHarness,
) -> None:
    request = chat(stream=True, stream_options={"include_usage": True})
    answer = await harness.http.post(CHAT, json=request)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.count('"usage"') == 1
    assert answer.text.endswith("data: [DONE]\n\n")
    assert json.loads(harness.engine.bodies[0]) == request


async def test_completions_embeddings_and_responses_work_with_the_sdk(harness: GatewayHarness) -> None:
    text = await harness.sdk.completions.create(model=MODEL, prompt="say", max_tokens=2)
    assert text.choices[0].text == "w0 w1"
    stream = await harness.sdk.completions.create(model=MODEL, prompt="say", max_tokens=2, stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["w0 ", "w1 "]
    embedding = await harness.sdk.embeddings.create(model=MODEL, input="x", encoding_format="float")
    assert embedding.data[0].embedding == [0.25, 0.5]
    response = await harness.sdk.responses.create(model=MODEL, input="hello")
    assert response.output_text == "w0 w1 w2"
    events = [
        event.type async for event in await harness.sdk.responses.create(model=MODEL, input="x", stream=True)
    ]
    assert events == ["response.created", "response.completed"]
    usages = [event[2] for event in harness.dispatcher.events if event[0] == "finished"]
    responses_usage = Usage(prompt_tokens=9, output_tokens=3, cached_tokens=4, ending=TurnEnd.DONE)
    generated = Usage(prompt_tokens=7, output_tokens=2, ending=TurnEnd.DONE)
    assert usages == [
        generated,
        generated,
        Usage(prompt_tokens=5, output_tokens=0),
        responses_usage,
        responses_usage,
    ]


async def test_what_a_client_states_reaches_the_scheduler(harness: GatewayHarness) -> None:
    headers = {
        "x-priority": "batch",
        "x-tenant": "acme",
        "x-queue-timeout-s": "2.5",
        "x-queue": "no-wait",
    }
    await harness.http.post(CHAT, json=chat(n=2, max_tokens=9), headers=headers)
    submission = harness.dispatcher.submissions[0]
    assert submission.priority is PriorityClass.BATCH
    assert submission.tenant == "acme"
    assert submission.queue_timeout_s == 2.5
    assert submission.no_wait
    assert (submission.spec.choices, submission.spec.max_output_tokens) == (2, 9)
    assert submission.spec.shape.text_bytes == 5


async def test_a_clients_own_priority_names_its_class_and_never_reaches_the_engine(
    harness: GatewayHarness,
) -> None:
    for own in (-5, 5, 0):
        await harness.http.post(CHAT, json=chat(priority=own))
    await harness.http.post(CHAT, json=chat(priority=5), headers={"x-priority": "interactive"})
    assert [submission.priority for submission in harness.dispatcher.submissions] == [
        PriorityClass.INTERACTIVE,
        PriorityClass.BATCH,
        PriorityClass.DEFAULT,
        PriorityClass.INTERACTIVE,
    ]
    assert [json.loads(body)["priority"] for body in harness.engine.bodies] == [0, 0, 0, 0]


async def test_the_engine_gets_the_priority_of_the_grant_whatever_the_client_wrote(
    harness: GatewayHarness,
) -> None:
    harness.dispatcher.engine_priority = 1_000_003
    bodies = [chat(), chat(priority=-5), chat(priority=0, stream=True)]
    for body in bodies:
        await harness.http.post(CHAT, json=body)
    assert [json.loads(body)["priority"] for body in harness.engine.bodies] == 3 * [1_000_003]
    # Nothing else has changed.
    received = [{**json.loads(body), "priority": None} for body in harness.engine.bodies]
    received[2].pop("stream_options")
    assert received == [{**body, "priority": None} for body in bodies]


async def test_each_try_brings_the_engine_the_priority_of_its_own_grant(harness: GatewayHarness) -> None:
    harness.dispatcher.engine_priority = 7
    harness.engine.answers.append(replies(503, {"error": {"message": "not now"}}))
    await harness.http.post(CHAT, json=chat())
    assert [json.loads(body)["priority"] for body in harness.engine.bodies] == [7, 7]


async def test_a_key_holds_for_the_class_of_the_priority_field_too() -> None:
    key = ApiKey(tenant="a", key="k", highest_class=PriorityClass.DEFAULT)
    async with running_gateway(keys=(key,)) as harness:
        bearer = {"authorization": "Bearer k"}
        answer = await harness.http.post(CHAT, json=chat(priority=-1), headers=bearer)
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "priority")
    assert not harness.dispatcher.submissions


EMPTY = b'{"model":"tiny","messages":[]}'


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "code", "words"),
    [
        ("POST", CHAT, b"{", {}, 400, None, "not valid JSON"),
        ("POST", CHAT, b'{"model":"tiny","messages":1}', {}, 400, None, "messages is invalid"),
        ("POST", CHAT, b'{"model":"gpt","messages":[]}', {}, 404, "model_not_found", "models: tiny"),
        ("POST", CHAT, EMPTY, {b"x-priority": b"max"}, 400, None, "'max'"),
        ("POST", CHAT, b"x" * 3000, {}, 413, "body_too_large", "2048 bytes"),
        ("GET", CHAT, b"", {}, 405, "method_not_allowed", "use POST"),
        ("POST", "/v1/models", b"", {}, 405, "method_not_allowed", "use GET"),
        ("GET", "/v1/models/gpt", b"", {}, 404, "model_not_found", "models: tiny"),
        ("POST", "/v1/audio/speech", b"{}", {}, 404, "not_found", "unknown path"),
        ("POST", "/chat/completions", b"{}", {}, 404, "not_found", f"/chat/completions: use {CHAT}"),
        ("POST", "/v1/v1/chat/completions", b"{}", {}, 404, "not_found", f"use {CHAT}"),
        ("POST", CHAT + "/", b"{}", {}, 404, "not_found", f"{CHAT}/: use {CHAT}"),
        ("GET", "/v1/models/", b"", {}, 404, "not_found", "use /v1/models"),
        ("GET", "/models/tiny", b"", {}, 404, "not_found", "use /v1/models/tiny"),
        ("GET", "/files", b"", {}, 404, "not_found", "use /v1/files"),
        ("GET", "/v1/health", b"", {}, 404, "not_found", "use /health"),
        ("POST", CHAT, EMPTY, {b"x-tenant": "é".encode()}, 400, None, "x-tenant: 'é' is"),
        ("POST", CHAT, EMPTY, {b"x-tenant": b"\xe9"}, 400, None, "x-tenant: 'é' is"),
        ("POST", CHAT, EMPTY, {b"x-priority": "é".encode()}, 400, None, "x-priority: 'é' is"),
        ("POST", "/tokenize", b"{}", {}, 400, None, "model is missing"),
    ],
)
async def test_rejections_speak_openais_language(
    method: str,
    path: str,
    content: bytes,
    headers: dict[bytes, bytes],
    status: int,
    code: str | None,
    words: str,
) -> None:
    async with running_gateway(max_body_bytes=2048) as harness:
        answer = await harness.http.request(method, path, content=content, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    assert harness.dispatcher.events == []


async def test_a_body_that_grows_past_the_limit_is_cut_off() -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    async with running_gateway(max_body_bytes=2048) as harness:
        answer = await harness.http.post(CHAT, content=endless())
    assert answer.status_code == 413


async def test_the_sdk_sends_its_key_and_raises_without_it() -> None:
    key = ApiKey(tenant="acme", key="k1", default_class=PriorityClass.BATCH)
    async with running_gateway(keys=(key,)) as harness:
        with pytest.raises(openai.AuthenticationError) as caught:
            await harness.sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert caught.value.code == "invalid_api_key"
        sdk = harness.sdk.with_options(api_key="k1")
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    (submission,) = harness.dispatcher.submissions
    assert (submission.tenant, submission.priority) == ("acme", PriorityClass.BATCH)


async def test_models_are_listed_and_shown(harness: GatewayHarness) -> None:
    listed = await harness.sdk.models.list()
    assert [model.id for model in listed.data] == [MODEL]
    shown = (await harness.http.get(f"/v1/models/{MODEL}")).json()
    assert (shown["id"], shown["object"], shown["max_model_len"]) == (MODEL, "model", 4096)


async def test_model_names_may_contain_slashes() -> None:
    name = "org/model-7b"
    async with running_gateway(models=(ServedModel(name=name),)) as harness:
        assert (await harness.http.get(f"/v1/models/{name}")).json()["id"] == name


async def test_it_is_ready_when_every_model_has_a_replica(harness: GatewayHarness) -> None:
    assert (await harness.http.get("/health")).json() == {"status": "ok"}
    ready = (await harness.http.get("/ready")).json()
    assert ready == {"status": "ready", "models_without_replica": [], "models_without_scheduler": []}
    harness.dispatcher.ports = []
    answer = await harness.http.get("/ready")
    assert answer.status_code == 503
    assert answer.json()["models_without_replica"] == [MODEL]
    assert answer.json()["models_without_scheduler"] == []


async def test_a_model_that_starts_on_demand_is_ready_as_long_as_a_scheduler_can_start_it() -> None:
    async with running_gateway(models=(ServedModel(name=MODEL, starts_on_demand=True),)) as harness:
        http, harness.dispatcher.ports = harness.http, []
        assert (await http.get("/ready")).status_code == 200
        harness.dispatcher.is_connected = False
        answer = await http.get("/ready")
        assert (answer.status_code, answer.json()["status"]) == (503, "waiting")
        assert answer.json()["models_without_replica"] == [MODEL]
        assert answer.json()["models_without_scheduler"] == [MODEL]
        # The process itself is healthy and keeps queued requests until the next scheduler connects.
        assert (await http.get("/health")).status_code == 200


async def test_tokenize_goes_to_a_replica_without_being_scheduled(harness: GatewayHarness) -> None:
    answer = await harness.http.post("/tokenize", json={"model": MODEL, "prompt": "abc"})
    assert answer.json()["count"] == 3
    # Of the model, not of the replica that happens to answer.
    assert answer.json()["max_model_len"] == 4096
    assert harness.engine.paths == ["/tokenize"]
    assert harness.dispatcher.events == []
    harness.dispatcher.ports = [1, *harness.dispatcher.ports]
    assert (await harness.http.post("/tokenize", json={"model": MODEL, "prompt": "abc"})).status_code == 200
    harness.dispatcher.ports = harness.dispatcher.ports[1:]
    harness.engine.answers.append(replies(503, {}, [(b"x-replica-draining", b"1")]))
    draining = await harness.http.post("/tokenize", json={"model": MODEL, "prompt": "abc"})
    assert draining.status_code == 503
    harness.dispatcher.ports = []
    answer = await harness.http.post("/tokenize", json={"model": MODEL, "prompt": "abc"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


async def test_metrics_join_the_gateways_and_the_schedulers(harness: GatewayHarness) -> None:
    harness.dispatcher.page = "# TYPE ewsjf_waiting gauge\newsjf_waiting 3\n"
    await harness.http.post(CHAT, json=chat(max_tokens=3))
    await harness.http.post(CHAT, json=chat(max_tokens=3, stream=True))
    await harness.http.post(CHAT, content=b"{")
    page = (await harness.http.get("/metrics")).text
    samples = {
        (sample.name, sample.labels.get("outcome") or sample.labels.get("kind")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["ewsjf_gateway_requests_total", "completed"] == 2
    assert samples["ewsjf_gateway_requests_total", "rejected_invalid"] == 1
    assert samples["ewsjf_gateway_tokens_total", "output"] == 6
    assert samples["ewsjf_gateway_time_to_first_token_seconds_count", None] == 1
    assert samples["ewsjf_gateway_queue_wait_seconds_count", None] == 2
    assert samples["ewsjf_gateway_e2e_seconds_count", None] == 2
    assert samples["ewsjf_gateway_in_flight_requests", None] == 0
    assert samples["ewsjf_gateway_upstream_connects_total", None] == 1
    assert samples["ewsjf_waiting", None] == 3


def test_a_model_without_a_scheduler_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="no scheduler for the models b"):
        Gateway(GatewaySettings(models=(ServedModel(name="b"),)), {}, "gw")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"models": ()}, "name at least one model"),
        ({"models": (ServedModel(name="a"), ServedModel(name="a"))}, "twice: a, a"),
        ({"models": (ServedModel(name="a"),), "max_body_bytes": 5}, "max_body_bytes"),
    ],
)
def test_impossible_settings_are_rejected_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        GatewaySettings(**fields)
