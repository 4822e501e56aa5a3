"""Priority from the client's class to the engine's queue, over real sockets and without Ray."""

import asyncio

from serve_app.core.dispatch.promotion import EnginePrioritySettings
from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.engines.model import SchedulingPolicy
from tests.serving.channel.harness import scheduler_settings
from tests.serving.gateway.builders import MODEL
from tests.serving.gateway.fleet import fleet_of

BACKLOG = 6
# One sequence at a time, at 4 ms per token.
ENGINE = EmulatedEngineSettings(
    served_model_names=(MODEL,), max_num_seqs=1, scheduling_policy=SchedulingPolicy.PRIORITY
)


async def test_an_urgent_request_overtakes_a_backlog_that_the_engine_has_already() -> None:
    ended: list[int] = []
    engine = EmulatedEngine(ENGINE)
    await engine.start()
    mode = EnginePrioritySettings(enabled=True)
    settings = scheduler_settings(model=MODEL, policy="fcfs", engine_priority=mode)
    async with fleet_of([engine.app], settings=settings) as fleet:

        async def send_request(priority: int, tokens: int) -> None:
            body = {"model": MODEL, "prompt": "Hi", "max_tokens": tokens, "ignore_eos": True}
            answer = await fleet.http.post("/v1/completions", json={**body, "priority": priority})
            assert answer.status_code == 200, answer.text
            ended.append(priority)

        backlog = [asyncio.create_task(send_request(5, 500)) for _ in range(BACKLOG)]
        async with asyncio.timeout(30):
            while (await engine.load()).waiting < BACKLOG - 1:  # noqa: ASYNC110 - the engine reports only this
                await asyncio.sleep(0.01)
        before = len(ended)
        await send_request(-1, 2)
        # The running request had to end; no queued one was served first.
        assert ended.index(-1) <= before + 1
        for task in backlog:
            task.cancel()
        await asyncio.gather(*backlog, return_exceptions=True)
    await engine.stop()
