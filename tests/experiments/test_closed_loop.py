import pytest

from experiments.common.closed_loop import ClosedLoop, Exchange
from serve_app.bench.bodies import BodyFactory, BodySettings
from serve_app.bench.connection import BenchError, ConnectionPool
from serve_app.workloads.trace import TraceRequest
from tests.bench.scripted import Script, document, scripted, silence, stream_of, streaming

REQUEST = TraceRequest(arrival_s=0, prompt_tokens=20, output_tokens=3)


async def run(
    script: Script, concurrency: int, requests: int, timeout_s: float = 60.0
) -> tuple[list[Exchange], int]:
    async with scripted(script) as server:
        pool = ConnectionPool(server.target)
        loop = ClosedLoop(
            pool, BodyFactory(BodySettings(model="m"), "h"), REQUEST, stream=True, answer_timeout_s=timeout_s
        )
        try:
            return await loop.run(concurrency, requests), server.connections
        finally:
            pool.close()


async def test_each_client_sends_its_share_on_one_connection() -> None:
    exchanges, connections = await run(streaming(stream_of()), 3, 10)
    assert len(exchanges) == 10
    assert connections == 3
    assert all(0 < one.first_s <= one.whole_s and one.reads >= 1 for one in exchanges)


async def test_a_request_that_does_not_complete_ends_the_measurement() -> None:
    with pytest.raises(BenchError, match="ended as rejected_no_replica: HTTP 503 no_replica: no"):
        await run(document(503, {"error": {"message": "no", "code": "no_replica"}}), 2, 4)


async def test_an_answer_without_an_end_ends_the_measurement() -> None:
    with pytest.raises(BenchError, match=r"no end after 0\.2 s"):
        await run(silence, 2, 4, timeout_s=0.2)
