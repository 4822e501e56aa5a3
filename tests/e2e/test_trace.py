"""Real traffic through the whole application: each request concludes exactly once."""

import asyncio

import pytest

from experiments.common.load_test.open_loop import BodyFactory, BodySettings, OpenLoop
from serve_app.errors import Outcome
from serve_app.lab.workloads import WorkloadSettings, resolve
from tests.e2e.served import Served, wait_for

REQUESTS = 400


@pytest.mark.slow
async def test_every_request_of_a_conversation_trace_concludes_exactly_once(app: Served) -> None:
    trace = resolve(WorkloadSettings(trace="azure-conv", requests=REQUESTS, rate_per_s=40.0))
    before = app.metric("ewsjf_requests_concluded_total")
    bodies = BodyFactory(BodySettings(model="demo"))
    records = await OpenLoop(app.url, bodies, timeout_s=100.0).run(trace)
    # A request longer than every context is rejected by the engine, or by the gateway once it has learned the
    # length of such texts. It concludes like all others.
    fits = [request for request in trace.requests if request.prompt_tokens + request.output_tokens <= 8_192]
    assert len({record.request_id for record in records}) == len(records) == REQUESTS
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    rejected = {Outcome.REJECTED_INVALID, Outcome.REJECTED_TOO_LONG}
    lost = [record for record in records if record.outcome not in {Outcome.COMPLETED, *rejected}]
    assert [record.detail for record in lost] == []
    assert len(completed) >= len(fits)
    await asyncio.to_thread(
        wait_for, lambda: app.metric("ewsjf_requests_in_flight") == 0, 10, "an empty ledger"
    )
    assert app.metric("ewsjf_requests_concluded_total") - before == REQUESTS
    assert app.metric("ewsjf_requests_waiting") == 0
