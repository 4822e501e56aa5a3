"""Open-loop load over HTTP: each request of a trace is sent at its time, however slow answers are."""

import uvloop

from serve_app.lab.bench.endpoint import BenchError, base_url
from serve_app.lab.bench.load import BodyFactory, BodySettings, LoadResult, LoadSettings, OpenLoop
from serve_app.lab.workloads.trace import Trace


def play_trace(url: str, bodies: BodySettings, trace: Trace, timeout_s: float = 600.0) -> LoadResult:
    """Play all requests to their end; `timeout_s` limits each."""
    return uvloop.run(drive(url, bodies, trace, timeout_s))


async def drive(url: str, bodies: BodySettings, trace: Trace, timeout_s: float = 600.0) -> LoadResult:
    """Play the trace inside an event loop, for callers that measure something in parallel."""
    return await OpenLoop(base_url(url), BodyFactory(bodies), LoadSettings(timeout_s=timeout_s)).run(trace)


def all_completed(load: LoadResult) -> LoadResult:
    """Return the same result.

    Raises:
        BenchError: a request did not complete.
    """
    failed = [record for record in load.records if not record.completed]
    if failed:
        raise BenchError(f"{len(failed)} requests did not complete, the first: {failed[0].detail}")
    return load
