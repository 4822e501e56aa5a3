"""Context limits learned from rejections over HTTP, for endpoints that report none."""

import asyncio
import logging

import pytest

from tests.engines.adapters.recorded_rejections import CONTEXT, REJECTIONS
from tests.engines.servers import serving
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.builders import MODEL, replies

from .servers import VllmLike, watched


def silent() -> VllmLike:
    """Return an engine that reports its load but not its context."""
    engine = VllmLike()
    engine.models = {"data": [{"id": MODEL}]}
    return engine


@pytest.mark.parametrize("name", REJECTIONS)
async def test_a_rejected_request_moves_to_the_longer_pool_transparently_and_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    status, rejection, stated = REJECTIONS[name]
    small, large = silent(), VllmLike()
    large.models["data"][0]["max_model_len"] = 32_768
    small.answers.append(replies(status, rejection))
    caplog.set_level(logging.INFO, logger="ray.serve")
    async with serving(small) as one, serving(large) as two, watched(one, long=two) as fleet:
        await wait_until(lambda: len(fleet.open()) == 2, "both serve")
        # About 3,000 tokens: at home in the short pool.
        for _ in range(2):
            answer = await fleet.send_request(prompt="one two " * 1_500)
            assert (answer.status_code, answer.headers["x-pool"]) == (200, "long"), answer.text
        short = await fleet.send_request()
        assert (short.status_code, short.headers["x-pool"]) == (200, "short")
        replica = fleet.control_plane.live.status()["replicas"][fleet.watcher.describe()[0]["replica"]]
    assert (len(small.bodies), len(large.bodies)) == (2, 2)
    log_lines = [record.getMessage() for record in caplog.records if "context_learned" in record.getMessage()]
    assert replica["max_model_len"] is None
    if stated is not None:
        assert replica["learned_context_tokens"] == CONTEXT
        assert len(log_lines) == 1
    else:
        # The long pool's engine counted seven tokens.
        assert 0 < replica["learned_context_tokens"] < 10_000
        assert 1 <= len(log_lines) <= 2


async def test_with_one_pool_the_client_gets_the_engines_own_message() -> None:
    status, rejection, _ = REJECTIONS["llama.cpp"]
    engine = silent()
    engine.answers.extend([replies(status, rejection)] * 2)
    async with serving(engine) as url, watched(url) as fleet:
        await wait_until(lambda: len(fleet.open()) == 1, "it serves")
        for _ in range(2):
            answer = await fleet.send_request(prompt="one two " * 1_500)
            assert answer.status_code == 400
            assert "exceeds the available context size (1024 tokens)" in answer.json()["error"]["message"]
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        await asyncio.sleep(0)
        assert (await fleet.send_request()).status_code == 200
    assert len(engine.bodies) == 3
