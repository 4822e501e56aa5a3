"""Spans of a real vLLM engine, as children of the gateway's spans."""

import pytest

from tests.engines.servers import until
from tests.engines.vllm.real import ARGS, QUICK_START, TINY, running
from tests.engines.vllm.serving_stack import serving_stack
from tests.serving.gateway.tracing.collector import Collector, collecting

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def there(collector: Collector, name: str) -> bool:
    return len(collector.named(name)) >= 2


async def test_the_span_of_the_engine_is_a_child_of_ours_and_absent_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector:
        endpoint = f"{collector.url}/v1/traces"
        # vLLM writes this variable itself, for its other processes.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        environment = {**QUICK_START, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        options = {**ARGS, "otlp_traces_endpoint": endpoint}
        async with (
            running(TINY, args=options, env=environment) as engine,
            serving_stack(engine.engine, engine.limits, tracing=True) as stack,
        ):
            body = {"model": "m", "prompt": "Hi", "max_tokens": 4, "ignore_eos": True}
            for flags in ("01", "00"):
                headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
                answer = await stack.http.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200

            # This request is sampled, so all spans of the second one were exported before its own.
            await stack.http.post("/v1/completions", json=body)
            await until(lambda: there(collector, "llm_request"), 30.0)
            await until(lambda: there(collector, "text_completion m"), 30.0)
    ours, forward = collector.only_of(TRACE, "text_completion m"), collector.only_of(TRACE, "ewsjf.forward")
    engines = collector.only_of(TRACE, "llm_request")
    assert (ours.parent_id, forward.parent_id, engines.parent_id) == (PARENT, ours.id, forward.id)
    assert engines.is_within(forward)
    assert (
        engines.attributes["gen_ai.usage.completion_tokens"]
        == ours.attributes["gen_ai.usage.output_tokens"]
        == 4
    )
    assert engines.attributes["gen_ai.usage.prompt_tokens"] == ours.attributes["gen_ai.usage.input_tokens"]
