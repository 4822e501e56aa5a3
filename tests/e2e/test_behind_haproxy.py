"""The application behind HAProxy, as on several nodes. Other tests reach gateways straight."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from experiments.common.processes import process_tree
from tests.e2e.served import Served, serve, wait_for

pytestmark = pytest.mark.timeout(300)

POOL = {
    "name": "only",
    "engine": {"emulated": {"profile": "laptop", "max_model_len": 4096}},
    "resources": {"num_cpus": 0.1},
}
ARGS = {
    "models": [{"name": "demo", "pools": [POOL]}],
    "gateways": {"replicas": 2, "num_cpus": 0.1},
}


@pytest.fixture(scope="module")
def behind() -> Iterator[Served]:
    with serve(ARGS, proxy_location="HeadOnly") as served:
        yield served


def test_answers_and_streams_pass_haproxy(behind: Served) -> None:
    assert any(each.name == "haproxy" for each in process_tree(behind.application.pid))
    with openai.OpenAI(base_url=f"{behind.url}/v1", api_key="none", max_retries=0, timeout=60) as sdk:
        asked: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 20,
        }
        whole = sdk.chat.completions.create(**asked)
        chunks = list(
            sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_gateways_know_who_has_connected_to_haproxy(behind: Served) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"x-forwarded-for": "192.0.2.7", "x-request-id": "whose"}
    answer = httpx.post(f"{behind.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200

    def lines() -> list[str]:
        return [each for each in behind.application.log_lines("gateway") if "client_request_id=whose" in each]

    wait_for(lambda: bool(lines()), 20, "the request is logged")
    assert " client=127.0.0.1 forwarded_for=192.0.2.7 " in lines()[0]


def test_haproxy_answers_what_serve_says_of_the_application(behind: Served) -> None:
    assert httpx.get(f"{behind.url}/-/healthz", timeout=20).status_code == 200
    assert json.loads(httpx.get(f"{behind.url}/-/routes", timeout=20).text) == {"/": "ewsjf"}
