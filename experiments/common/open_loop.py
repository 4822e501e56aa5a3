"""Open-loop load over HTTP: each request of a trace is sent at its time, however slow answers are."""

import uvloop

from serve_app.lab.bench.connection import BenchError, ConnectionPool, Target
from serve_app.lab.bench.load import BodyFactory, BodySettings, LoadResult, LoadSettings, OpenLoop
from serve_app.lab.workloads.trace import Trace


def play_trace(url: str, bodies: BodySettings, trace: Trace, timeout_s: float = 600.0) -> LoadResult:
    """Play all requests to their end; `timeout_s` limits each."""
    return uvloop.run(drive(url, bodies, trace, timeout_s))


async def drive(url: str, bodies: BodySettings, trace: Trace, timeout_s: float = 600.0) -> LoadResult:
    """Play the trace inside an event loop, for callers that measure something in parallel."""
    target = Target.parse(url)
    pool = ConnectionPool(target)
    try:
        factory = BodyFactory(bodies, target.authority, target.path_prefix)
        return await OpenLoop(pool, factory, LoadSettings(timeout_s=timeout_s)).run(trace)
    finally:
        pool.close()


def all_completed(load: LoadResult) -> LoadResult:
    """Return the same result.

    Raises:
        BenchError: a request did not complete.
    """
    failed = [record for record in load.records if not record.completed]
    if failed:
        raise BenchError(f"{len(failed)} requests did not complete, the first: {failed[0].detail}")
    return load
