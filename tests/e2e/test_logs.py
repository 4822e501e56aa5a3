"""Logs and traces of a served application: JSON lines with the caller, through the real port."""

import json
import time
from typing import Any

import httpx
import pytest

from experiments.common.application import Application, serve_config, served_application
from tests.e2e.served import wait_for
from tests.serving.gateway.tracing.collector import collecting

pytestmark = pytest.mark.timeout(400)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CHAT = "/v1/chat/completions"
MODEL = {
    "name": "demo",
    "pools": [
        {
            "name": "only",
            "engine": {"emulated": {"profile": "laptop", "max_model_len": 2048}},
            "resources": {"num_cpus": 0.1},
        }
    ],
}


def concluded_requests(application: Application, count: int) -> list[dict[str, Any]]:
    """Return the documents of concluded requests in the gateway's log."""
    deadline = time.monotonic() + 20
    while True:
        documents = [json.loads(line) for line in application.log_lines("gateway")]
        found = [each for each in documents if each.get("event") == "concluded"]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, documents
        time.sleep(0.1)


@pytest.mark.slow
def test_a_line_of_json_names_the_caller_and_the_trace() -> None:
    key = {"tenant": "acme", "key": "s3cret-of-acme"}
    config = serve_config("logs", {"models": [MODEL], "gateway": {"keys": [key], "tracing": True}})
    config["logging_config"] = {"enable_access_log": False, "encoding": "JSON"}
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    headers = {
        "authorization": "Bearer s3cret-of-acme",
        "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
        # The header is the client's claim; the connection's address is reliable.
        "x-forwarded-for": "9.9.9.9",
    }
    with collecting() as collector:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with served_application(config, environment=environment) as application:
            url = application.url + CHAT
            assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
            assert httpx.post(url, json=body, timeout=60).status_code == 401
            served, unknown = concluded_requests(application, 2)
            wait_for(lambda: len(collector.spans) >= 5, 20, lambda: [each.name for each in collector.spans])
            raw = "\n".join(application.log_lines("gateway"))
    assert served["message"] == "concluded"
    assert (served["outcome"], served["status"], served["tenant"]) == ("completed", 200, "acme")
    assert (served["key"], served["client"]) == ("config/acme", "127.0.0.1")
    assert served["forwarded_for"] == "9.9.9.9"
    assert (served["trace_id"], served["output_tokens"], served["pool"]) == (TRACE, 5, "only")
    assert isinstance(served["e2e_s"], float)
    # Serve's own fields are present, and the gateway is named differently from the engine's replica.
    assert served["deployment"] == "logs_gateway"
    assert served["replica"] != served["gateway"]
    assert (unknown["outcome"], unknown["status"]) == ("rejected_unauthorised", 401)
    assert unknown["client"] == "127.0.0.1"
    assert "forwarded_for" not in unknown
    assert "s3cret" not in raw
    assert {each.trace_id for each in collector.spans} >= {TRACE}
    assert collector.only("chat demo").attributes["ewsjf.tenant"] == "acme"
