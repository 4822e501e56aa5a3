"""Objectives of llm-d under saturation: the priority mix of its benchmark, over HTTP and a live scheduler."""

import asyncio
from statistics import median

from serve_app.request import PriorityClass
from serve_app.serving.gateway import ApiKey
from serve_app.serving.gateway.request.fields import ObjectiveSettings
from tests.serving.gateway.builders import Engine, chat

from .fleet import Fleet, fleet_of

HEADER = "x-llm-d-inference-objective"
CLASSES = {"premium-traffic": "interactive", "standard": "default", "nightly": "batch"}


async def first_token_at(fleet: Fleet, request_id: str, objective: str) -> float:
    """Send a request with an objective; return the time of its first token once it is complete."""
    headers = {HEADER: objective, "x-request-id": request_id}
    loop, found = asyncio.get_running_loop(), 0.0
    request = chat(stream=True, max_tokens=4)
    async with fleet.http.stream("POST", "/v1/chat/completions", json=request, headers=headers) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            found = found or (loop.time() if '"content"' in line else 0.0)
    return found


async def test_objectives_are_served_by_priority_in_saturation_and_none_is_lost() -> None:
    engine = Engine(token_delay_s=0.02)
    objectives = {"nightly": ObjectiveSettings(class_=PriorityClass.BATCH)}
    keys = (ApiKey(tenant="ops", key="k", admin=True),)
    async with fleet_of([engine], objectives=objectives, keys=keys) as fleet:
        fleet.http.headers["authorization"] = "Bearer k"
        fleet.gateway.show_objectives("inferencepool+http://chat", {"premium-traffic": 100, "standard": 0})
        # The lowest priority first, so that the order of arrival would give the opposite result.
        sent = [(name, f"{name}-{number}") for name in reversed(CLASSES) for number in range(20)]
        times = await asyncio.gather(*(first_token_at(fleet, own_id, name) for name, own_id in sent))

        medians = {
            each: median(at for at, (name, _) in zip(times, sent, strict=True) if name == each)
            for each in CLASSES
        }
        assert medians["premium-traffic"] < medians["standard"] < medians["nightly"]
        assert len(engine.bodies) == len(sent)
        for name, priority in CLASSES.items():
            receipt = (await fleet.http.get(f"/debug/requests/{name}-7")).json()
            assert (receipt["class"], receipt["outcome"]) == (priority, "completed")
