"""Gateways behind Ray Serve's own proxy, which calls them as ASGI apps; other tests bypass it."""

from typing import Any

import httpx
import openai
import pytest

from experiments.common.ports import is_free
from tests.e2e.served import serve, wait_for

POOL = {
    "name": "only",
    "engine": {"emulated": {"profile": "laptop", "max_model_len": 4096}},
    "resources": {"num_cpus": 0.1},
}
ARGS = {
    "models": [{"name": "demo", "pools": [POOL]}],
    "gateways": {"replicas": 2, "num_cpus": 0.1},
}
ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 20,
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_proxy_of_serve_reaches_gateways_as_it_reaches_any_asgi_app() -> None:
    with serve(ARGS, proxy_location="HeadOnly") as served:
        assert not is_free(int(served.url.rpartition(":")[2]))
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as sdk:
            whole = sdk.chat.completions.create(**ASKED)
            chunks = list(
                sdk.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
            )
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 20
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 20
        # A client that disconnects in mid-stream ends its request.
        body = {**ASKED, "max_tokens": 3_000, "stream": True}
        headers = {"x-request-id": "left"}
        url = f"{served.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            assert answer.headers.get_list("x-request-id") == ["left"]
            next(answer.iter_lines())

        def left() -> list[str]:
            return [each for each in served.application.log_lines("gateway") if "request_id=left" in each]

        wait_for(lambda: bool(left()), 30, "the end of the request is logged")
        assert "outcome=cancelled" in left()[0]
