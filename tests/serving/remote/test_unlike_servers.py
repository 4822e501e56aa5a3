"""Servers of different speed without metrics, over HTTP."""

from collections import Counter
from contextlib import AsyncExitStack

import pytest

from serve_app.core.routing import prefill_cost
from tests.engines.servers import serving
from tests.serving.channel.harness import wait_until

from .servers import VllmLike, watched


def without_metrics(token_delay_s: float) -> VllmLike:
    engine = VllmLike(token_delay_s=token_delay_s)
    engine.metrics_status = 404
    return engine


@pytest.mark.parametrize("fast_is_first", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_single_requests_go_to_the_faster_server(
    monkeypatch: pytest.MonkeyPatch, fast_is_first: bool, stream: bool
) -> None:
    monkeypatch.setattr(prefill_cost, "_COMPARE_S", 0.0)
    fast, slow = without_metrics(0.001), without_metrics(0.05)
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(serving(engine)) for engine in (fast, slow)]
        fleet = await stack.enter_async_context(watched(*((one, two) if fast_is_first else (two, one))))
        await wait_until(lambda: len(fleet.open()) == 2, "both serve")
        answers = [await fleet.send_request(stream=stream) for _ in range(30)]
    chosen = [answer.headers["x-replica"] for answer in answers]
    name = f"short/{one.removeprefix('http://')}"
    # Until both are known, they take turns.
    assert Counter(chosen[:6])[name] == 3
    assert set(chosen[8:]) == {name}
