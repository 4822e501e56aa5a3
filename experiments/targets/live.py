"""The same requests to an application with emulated engines, over HTTP."""

import contextlib
import json
import time
import uuid
from asyncio import sleep
from collections.abc import Iterator, Sequence

import aiohttp
import uvloop

from experiments.common.application import Application, emulated_pool, serve_config, served_application
from experiments.common.load_test.open_loop import LATE_AFTER_S, BodyFactory, BodySettings, OpenLoop
from experiments.common.load_test.response import ResponseParser
from experiments.targets.figures import Judgement, figures_of
from serve_app.core.metrics.record import RequestRecord
from serve_app.lab.simulation.simulation import ReplicaPlan
from serve_app.lab.workloads import Trace, TraceRequest

USUAL, CAUTIOUS = "usual", "cautious"
"""Models that refuse requests at the default chance of a miss, and at a lower one."""
# Retries have the number of their first attempt plus this.
_RETRY = 1_000_000


@contextlib.contextmanager
def served_engines(profile: str, plans: Sequence[ReplicaPlan], refuse_above: float) -> Iterator[Application]:
    """Serve an application with both models, each with these engines, emulated."""
    threshold = plans[0].engine.long_prefill_token_threshold
    advanced = {"long_prefill_token_threshold": threshold}
    pool = emulated_pool("all", len(plans), resources={"num_cpus": 0.1}, profile=profile, advanced=advanced)
    scheduler = {"policy": "ewsjf"}
    cautious = {**scheduler, "latency_targets": {"refuse_above": refuse_above}}
    models = [
        {"name": USUAL, "pools": [pool], "scheduler": scheduler},
        {"name": CAUTIOUS, "pools": [pool], "scheduler": cautious},
    ]
    with served_application(serve_config("targets", {"models": models})) as served:
        yield served


def live_figures(
    served: Application,
    model: str,
    trace: Trace,
    targets_s: Sequence[float | None],
    *,
    states_targets: bool,
) -> dict[str, object]:
    """Send all requests at their times, and return the figures that clients see.

    Args:
        targets_s: the target of each request; None for the others.
        states_targets: whether requests state their target, and retry once if they are refused.
    """
    bodies = _Bodies(BodySettings(model=model, max_tokens=0), targets_s if states_targets else ())
    loop = _Retrying(served.url, bodies)
    records = uvloop.run(loop.run(trace))
    judged = {
        _name(number + later): Judgement(target_s, retry_of=_name(number) if later else "")
        for number, target_s in enumerate(targets_s)
        if target_s is not None
        for later in (0, _RETRY)
    }
    for number in loop.refused:
        judged[_name(number)].refused = True
    of_receipts = _read_receipts(served, bodies.prefix, records, judged) if states_targets else {}
    first_at = min(one.arrived_at for one in records)
    last_at = max(one.arrived_at for one in records)
    return {
        **figures_of(records, judged),
        **of_receipts,
        "not_completed": sum(
            not one.completed and not (one.request_id in judged and judged[one.request_id].refused)
            for one in records
        ),
        "sent_late": sum(one.schedule_lag_s > LATE_AFTER_S for one in records) / len(records),
        "seconds": last_at - first_at,
    }


class _Bodies(BodyFactory):
    """Bodies of the requests, and headers with their targets.

    Attributes:
        prefix: of the ids that its requests have in receipts; other runs have other ids.
    """

    def __init__(self, settings: BodySettings, targets_s: Sequence[float | None]) -> None:
        super().__init__(settings)
        self.prefix = f"{uuid.uuid4().hex}-"
        self._targets_s = targets_s

    def body(self, number: int, request: TraceRequest) -> bytes:
        """Return the body of a request, which is also that of its retry."""
        return super().body(number % _RETRY, request)

    def headers(self, number: int, request: TraceRequest) -> dict[str, str]:
        """Return the headers of a request or of its retry."""
        headers = {**super().headers(number, request), "x-request-id": f"{self.prefix}{_name(number)}"}
        target_s = self._targets_s[number % _RETRY] if self._targets_s else None
        if target_s is None:
            return headers
        return {**headers, "x-slo-ttft-ms": f"{1e3 * target_s:.3f}", "x-slo": "refuse"}


class _Retrying(OpenLoop):
    """Sender that retries each refused request once, after its `Retry-After`.

    Attributes:
        refused: the delays in seconds by number of the request; None without `Retry-After`.
    """

    def __init__(self, url: str, bodies: BodyFactory) -> None:
        super().__init__(url, bodies)
        self.refused: dict[int, float | None] = {}

    async def _send(
        self, session: aiohttp.ClientSession, number: int, request: TraceRequest, due: float
    ) -> None:
        await super()._send(session, number, request, due)
        delay_s = self.refused.get(number)
        if delay_s is not None and number < _RETRY:
            await sleep(delay_s)
            await super()._send(session, number + _RETRY, request, time.monotonic())

    async def _exchange(
        self, session: aiohttp.ClientSession, number: int, request: TraceRequest, parser: ResponseParser
    ) -> None:
        await super()._exchange(session, number, request, parser)
        if parser.status == 429:
            after = parser.headers.get("retry-after")
            self.refused[number] = None if after is None else float(after)


def _read_receipts(
    served: Application, prefix: str, records: Sequence[RequestRecord], judged: dict[str, Judgement]
) -> dict[str, object]:
    """Read the predicted chances; return how often the client sees another result than the receipt."""
    others = 0
    for one in records:
        if (mine := judged.get(one.request_id)) is None:
            continue
        receipt = json.loads(served.fetched(f"/debug/requests/{prefix}{one.request_id}"))
        target = receipt["latency_target"]
        mine.chance = target["chance_of_miss"]
        met = None if one.ttft_s is None else one.ttft_s <= mine.target_s
        others += met is not target["ttft_met"]
    return {"receipts_differ": others}


def _name(number: int) -> str:
    return f"bench-{number}"
