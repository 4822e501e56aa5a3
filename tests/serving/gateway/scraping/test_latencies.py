"""Latency metrics of a gateway: tokens, targets and the gateway's own time."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serve_app.core.metrics.summary import ClassTarget, ClassTargets
from serve_app.serving.gateway import ServedModel
from tests.serving.gateway.builders import MODEL, Engine, chat
from tests.serving.gateway.fleet import fleet_of

STRICT = ClassTargets(default=ClassTarget(ttft_s=10.0, long_ttft_s=10.0, tpot_s=0.001))
LAX = ClassTargets(default=ClassTarget(ttft_s=60.0, long_ttft_s=60.0, tpot_s=10.0))


async def page_after_a_stream(targets: ClassTargets) -> dict[str, float]:
    """Stream one answer with 20 ms per token; return the sums of samples by name."""
    served = ServedModel(name=MODEL, targets=targets)
    async with fleet_of([Engine(token_delay_s=0.02)], models=(served,)) as fleet:
        async with fleet.http.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=8)
        ) as answer:
            assert answer.status_code == 200
            await answer.aread()
        return await samples(fleet.http)


async def samples(http: httpx.AsyncClient) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            names = [sample.name]
            names += [
                f"{sample.name} {sample.labels[name]}" for name in ("kind", "stage") if name in sample.labels
            ]
            for name in names:
                found[name] = found.get(name, 0.0) + sample.value
    return found


async def test_the_gaps_between_tokens_and_the_added_latency_are_measured() -> None:
    found = await page_after_a_stream(LAX)
    gaps = "ewsjf_gateway_inter_token_latency_seconds"
    assert 5 <= found[f"{gaps}_count"] <= 10
    assert 0.1 <= found[f"{gaps}_sum"] < 5
    assert found["ewsjf_gateway_time_per_output_token_seconds_count"] == 1
    assert 0.01 <= found["ewsjf_gateway_time_per_output_token_seconds_sum"] < 1
    assert found["ewsjf_gateway_slo_attained_requests_total"] == 1
    assert found["ewsjf_gateway_slo_violations_total"] == 0
    for stage in ("parse", "schedule"):
        assert found[f"ewsjf_overhead_seconds_count {stage}"] == 1
        assert 0 < found[f"ewsjf_overhead_seconds_sum {stage}"] < 1
    assert found["ewsjf_overhead_seconds_count decide"] >= 3


async def test_an_answer_beyond_its_targets_is_counted_by_what_it_missed() -> None:
    found = await page_after_a_stream(STRICT)
    assert found["ewsjf_gateway_slo_attained_requests_total"] == 0
    assert found["ewsjf_gateway_slo_violations_total tpot"] == 1
    assert found["ewsjf_gateway_slo_violations_total ttft"] == 0
