"""Predicted and reported cached tokens: a gateway over HTTP, a live scheduler and an engine."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serve_app.serving.scheduler.findings import status_findings
from tests.serving.gateway.builders import MODEL, Engine, chat, emulated, replies
from tests.serving.gateway.fleet import Fleet, fleet_of

CHAT = "/v1/chat/completions"
# Some 1,500 tokens, so that all but the end of a repeated prompt are predicted to be cached.
PROMPT = "All of this is said in each of the requests of this conversation. " * 100


def answer(prompt: int, cached: int) -> Any:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": 1,
        "total_tokens": prompt + 1,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    choice = {"index": 0, "message": {"role": "assistant", "content": "w"}, "finish_reason": "stop"}
    return replies(200, {"id": "a", "model": MODEL, "choices": [choice], "usage": usage})


async def ask(fleet: Fleet, engine: Engine, cached: int) -> None:
    engine.answers.append(answer(1_500, cached))
    body = chat(messages=[{"role": "user", "content": PROMPT}])
    assert (await fleet.http.post(CHAT, json=body)).status_code == 200


async def counts(fleet: Fleet) -> dict[str, float]:
    """Return the counters by kind, and the errors by upper bound."""
    found = {}
    for family in text_string_to_metric_families((await fleet.http.get("/metrics")).text):
        for sample in family.samples:
            if sample.name == "ewsjf_prefix_cached_tokens_total":
                found[sample.labels["kind"]] = sample.value
            if sample.name == "ewsjf_prefix_prediction_error_ratio_bucket":
                found[sample.labels["le"]] = sample.value
    return found


async def test_an_engine_that_has_what_the_index_predicts_has_no_error() -> None:
    engine = Engine()
    async with fleet_of([engine]) as fleet:
        await ask(fleet, engine, cached=0)
        for _ in range(3):
            await ask(fleet, engine, cached=1_490)
        found = await counts(fleet)
        assert found["reported"] == 3 * 1_490
        assert 0.9 < found["predicted"] / found["reported"] <= 1.0
        assert found["+Inf"] - found["-0.1"] == 3
        recent = fleet.control_plane.live.status()["prefix"]["short"]
        assert 2.9 < recent["requests"] < 3.1
        assert recent["predicted_tokens"] / found["predicted"] > 0.99


async def test_an_engine_that_has_forgotten_the_prompt_is_an_error_and_a_finding() -> None:
    engine = Engine()
    async with fleet_of([engine]) as fleet:
        await ask(fleet, engine, cached=16)
        for _ in range(60):
            await ask(fleet, engine, cached=0)
        found = await counts(fleet)
        assert found["reported"] == 16
        assert found["+Inf"] - found["0.75"] == 60
        (finding,) = status_findings(fleet.control_plane.live.status())
        assert "and engines reported 16" in finding.what


async def test_equal_prompts_shorter_than_a_block_of_the_index_are_no_finding() -> None:
    async with emulated(profile="laptop", speed_up=20.0) as engine, fleet_of([engine.app]) as fleet:
        for _ in range(60):
            body = chat(messages=[{"role": "user", "content": PROMPT[:400]}], max_tokens=1)
            assert (await fleet.http.post(CHAT, json=body)).status_code == 200
        recent = fleet.control_plane.live.status()["prefix"]["short"]
        # The engine's blocks are finer than those of the index.
        assert recent["predicted_tokens"] == 0
        assert recent["reported_tokens"] > 0.8 * recent["prompt_tokens"]
        assert list(status_findings(fleet.control_plane.live.status())) == []


async def test_an_engine_that_reports_no_cached_tokens_shows_nothing() -> None:
    engine = Engine()
    async with fleet_of([engine]) as fleet:
        for _ in range(3):
            await ask(fleet, engine, cached=0)
        assert await counts(fleet) == {}
