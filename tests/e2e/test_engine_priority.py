"""Priorities through the whole application: clients name classes, engines order their own queues."""

import asyncio

import httpx
import pytest

from tests.e2e.served import Served, serve, wait_for

# It needs its own application; `tests/serving/test_engine_priority.py` tests the same without Ray.
pytestmark = pytest.mark.slow

# One sequence at a time, at 4 ms per token: a batch request takes two seconds, and six are a backlog.
ENGINE = {"profile": "laptop", "max_num_seqs": 1, "advanced": {"scheduling_policy": "priority"}}
BATCH_TOKENS, BACKLOG = 500, 6
ARGS = {
    "models": [
        {
            "name": "demo",
            "pools": [
                {
                    "name": "only",
                    "engine": {"emulated": ENGINE},
                    "resources": {"num_cpus": 0.1},
                    "drain_timeout_s": 5.0,
                }
            ],
            "scheduler": {"policy": "fcfs", "engine_priority": {"enabled": True}},
        }
    ],
    "gateways": {"num_cpus": 0.1, "drain_timeout_s": 5.0},
}


@pytest.mark.timeout(300)
async def test_an_urgent_request_overtakes_a_backlog_that_the_engine_has_already() -> None:
    with serve(ARGS) as app:
        async with httpx.AsyncClient(base_url=app.url, timeout=60) as http:
            ended: list[int] = []
            backlog = [
                asyncio.create_task(send_request(http, ended, 5, BATCH_TOKENS)) for _ in range(BACKLOG)
            ]
            await asyncio.to_thread(wait_for, lambda: in_flight(app) == BACKLOG, 10, "the backlog")
            before = len(ended)
            urgent = await send_request(http, ended, -1, 2)
            # The running request ends first; no queued one is scheduled before the urgent one.
            assert ended.index(-1) <= before + 1
            assert urgent["x-pool"] == "only"
            await asyncio.gather(*backlog)
    assert len(ended) == BACKLOG + 1


def in_flight(app: Served) -> float:
    return app.metric("ewsjf_requests_in_flight", pool="only")


async def send_request(
    http: httpx.AsyncClient, ended: list[int], priority: int, tokens: int
) -> httpx.Headers:
    """Send a request as a client of vLLM does, with a number for a class."""
    body = {"model": "demo", "prompt": "Hi", "max_tokens": tokens, "ignore_eos": True, "priority": priority}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    ended.append(priority)
    return answer.headers
