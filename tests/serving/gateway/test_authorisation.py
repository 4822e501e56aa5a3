"""Authorisation matrix: every endpoint with every kind of key, over HTTP."""

from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.request import PriorityClass
from serve_app.serving.access import ADMIN_KEY_VARIABLE
from serve_app.serving.api_keys import changed_keys
from serve_app.serving.gateway import ApiKey, ServedModel
from serve_app.serving.gateway.dashboard import DASHBOARD_PATH, EVENTS_PATH
from serve_app.serving.gateway.dashboard.pages import STATIC_FOLDER
from serve_app.serving.gateway.request.endpoints import FORMS, SCHEDULED
from tests.serving.test_api_keys import record

from .builders import MODEL, Answers, FakeDispatcher, gateway
from .conftest import running_gateway

PAST = datetime.now(UTC) - timedelta(days=1)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "expired": {"expires_at": PAST},
    "revoked": {"revoked_at": PAST},
    "other model": {"models": ("other",)},
    "lower class": {"highest_class": PriorityClass.BATCH},
    "may act": {"may_act_for_tenants": True},
    "admin": {"admin": True},
}
ALL_KINDS = ("none", "unknown", *KINDS, "written", "own admin")
NOBODY_YET = dict.fromkeys(("none", "unknown", "expired", "revoked"), 401)

PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "hello"}
RANKED: dict[str, Any] = {"model": MODEL, "query": "a", "documents": ["b"]}
MESSAGE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "hello"}],
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": PROMPT,
    "/v1/responses": {"model": MODEL, "input": "hello"},
    "/v1/embeddings": {"model": MODEL, "input": "hello"},
    "/v1/messages": MESSAGE,
    "/v2/embed": {"model": MODEL, "texts": ["hello"]},
    "/pooling": {"model": MODEL, "input": "hello"},
    "/classify": {"model": MODEL, "input": "hello"},
    **{path: {"model": MODEL, "queries": "a", "documents": "b"} for path in ("/v1/score", "/score")},
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RANKED),
    "/tokenize": PROMPT,
    "/detokenize": {"model": MODEL, "tokens": [1]},
    "/v1/messages/count_tokens": MESSAGE,
}
# No such response exists: authorised callers get 404.
STORED = {"/v1/responses/resp_1": "GET", "/v1/responses/resp_1/cancel": "POST"}
ADMINS = {"admin": 200, "own admin": 200}
# Expected statuses other than 200, by endpoint and kind of key.
PAGE = tuple(f"{DASHBOARD_PATH}/{path.name}" for path in STATIC_FOLDER.iterdir() if path.suffix != ".html")
OPEN = ("/health", "/ping", "/ready", DASHBOARD_PATH, *PAGE)
RECEIPTS = ("/debug/requests/nobody-s", "/debug/programs/nobody-s")
REDIRECTED = f"{DASHBOARD_PATH}/"
QUESTIONS = ("/version", "/tokenizer_info", "/load")
DEBUG = {
    EVENTS_PATH: "GET",
    "/debug/capture": "GET",
    "/debug/costs": "GET",
    "/debug/costs.csv": "GET",
    **dict.fromkeys(RECEIPTS, "GET"),
    "/debug/queue": "GET",
    "/debug/scaling": "GET",
    "/debug/status": "GET",
    "/debug/usage": "GET",
    "/debug/usage.csv": "GET",
    "/debug/tuner": "GET",
    "/debug/tuner/freeze": "POST",
    "/debug/tuner/thaw": "POST",
    "/metrics": "GET",
    "/metrics/engines": "GET",
    "/admin/endpoints": "GET",
    "/admin/keys": "GET",
    "/admin/mode": "GET",
}


def expected(path: str, kind: str) -> int:
    if path in OPEN:
        return 200
    if path == REDIRECTED:
        return 308
    if kind in NOBODY_YET:
        return 401
    if path in RECEIPTS and kind in ADMINS:
        return 404
    if path in DEBUG:
        return ADMINS.get(kind, 403)
    if path in STORED:
        return 404
    # Without a model in the request, these use a model that the key allows.
    if kind == "other model" and path not in ("/v1/models", *QUESTIONS):
        return 403
    return 200


class KeyedGateway:
    """A gateway with one secret of each kind."""

    def __init__(self, http: httpx.AsyncClient, secrets: Mapping[str, str]) -> None:
        self.http, self.secrets = http, secrets

    async def send_request(self, path: str, kind: str, **headers: str) -> httpx.Response:
        if kind in self.secrets:
            headers["authorization"] = f"Bearer {self.secrets[kind]}"
        if path in FORMS:
            files = {"file": ("a.wav", b"RIFF")}
            return await self.http.post(path, data={"model": MODEL}, files=files, headers=headers)
        if path in BODIES:
            return await self.http.post(path, json=BODIES[path], headers=headers)
        method = {**DEBUG, **STORED}.get(path, "GET")
        async with self.http.stream(method, path, headers=headers) as answer:
            # The event stream does not end.
            if path != EVENTS_PATH or answer.status_code != 200:
                await answer.aread()
        return answer


@pytest.fixture
async def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KeyedGateway]:
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "made-by-serve")
    made = {kind: record(**fields) for kind, fields in KINDS.items()}
    path = tmp_path / "keys.json"
    changed_keys(path, lambda _: [found for found, _ in made.values()])
    secrets = {kind: secret for kind, (_, secret) in made.items()}
    secrets |= {"unknown": "sk-of-somewhere-else", "written": "k1", "own admin": "made-by-serve"}
    models = tuple(ServedModel(name=name) for name in (MODEL, "other"))
    keys = (ApiKey(tenant="t", key="k1"),)
    async with running_gateway(models=models, keys=keys, keys_file=str(path), queries=Answers()) as harness:
        yield KeyedGateway(harness.http, secrets)


def routes() -> list[str]:
    models = ("/v1/models", f"/v1/models/{MODEL}")
    return [*BODIES, *FORMS, *STORED, *QUESTIONS, *models, *OPEN, REDIRECTED, *DEBUG]


async def test_no_endpoint_is_left_out() -> None:
    app = gateway(FakeDispatcher([]))
    unlisted = {each.path for each in app.router.routes if app.router.is_literal(each.path)} - set(routes())
    app.close()
    # Those of the Batch API have tests of their own (`batches/test_api.py`).
    assert unlisted == {"/v1/files", "/v1/batches"}


async def test_each_key_opens_its_endpoints_and_no_others(keyed: KeyedGateway) -> None:
    for kind in ALL_KINDS:
        answers = {path: await keyed.send_request(path, kind) for path in routes()}
        found = {path: answer.status_code for path, answer in answers.items()}
        assert found == {path: expected(path, kind) for path in routes()}, kind
        for path, answer in answers.items():
            if answer.status_code == 401:
                assert answer.headers["www-authenticate"] == "Bearer", path
            if answer.status_code == 403:
                assert answer.headers.get("www-authenticate") is None, path
                words = "admin: true" if path in DEBUG else "it may use: other"
                assert words in str(answer.json()["error"]), path


async def test_a_key_opens_the_same_in_the_header_of_anthropics_clients(keyed: KeyedGateway) -> None:
    for kind in ALL_KINDS:
        headers = {"x-api-key": keyed.secrets[kind]} if kind in keyed.secrets else {}
        for path in ("/v1/messages", "/v1/models", "/debug/queue", "/metrics"):
            answer = await keyed.send_request(path, "none", **headers)
            assert answer.status_code == expected(path, kind), (kind, path, answer.text)


async def test_each_key_sees_the_models_that_it_may_use(keyed: KeyedGateway) -> None:
    for kind in ("plain", "other model", "admin", "written"):
        listed = [model["id"] for model in (await keyed.send_request("/v1/models", kind)).json()["data"]]
        assert listed == (["other"] if kind == "other model" else [MODEL, "other"]), kind


async def test_no_key_sends_requests_above_its_class(keyed: KeyedGateway) -> None:
    for kind in ALL_KINDS:
        for path in (*SCHEDULED, *FORMS):
            answer = await keyed.send_request(path, kind, **{"x-priority": "interactive"})
            wanted = 403 if kind == "lower class" else expected(path, kind)
            assert answer.status_code == wanted, (kind, path, answer.text)
            answer = await keyed.send_request(path, kind, **{"x-priority": "batch"})
            assert answer.status_code == expected(path, kind), (kind, path, answer.text)


async def test_only_keys_with_the_right_act_for_another_tenant(keyed: KeyedGateway) -> None:
    # The application's admin key belongs to no client: it names tenants as keyless callers do.
    allowed = {"may act", "own admin"}
    for kind in ALL_KINDS:
        for path in (*SCHEDULED, *FORMS):
            answer = await keyed.send_request(path, kind, **{"x-tenant": "somebody-else"})
            wanted = expected(path, kind)
            wanted = wanted if kind in allowed or wanted == 401 else 403
            assert answer.status_code == wanted, (kind, path, answer.text)
            if kind == "plain":
                assert "may not act for tenant somebody-else" in answer.text, path
