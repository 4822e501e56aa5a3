"""Application as `report` sees it: pages with simulated traffic, which is exactly reproducible."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from serve_app.core import SchedulerSettings
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings_base import plain
from serve_app.engines.model.model import EngineModelSettings
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.simulation.run import Disclosure, requests_of
from serve_app.lab.simulation.simulation import ReplicaPlan, Simulation
from serve_app.lab.workloads import Trace, TraceRequest
from tests.cli.pages import answering

SETTINGS = SchedulerSettings(model="m", routing=RoutingSettings(pools=("default",)))
LONG_TOKENS = 3_000
_BEGAN = 1_700_000_000.0
_STEP_TIME = StepTimeModel(
    decode_base_s=0.02, decode_per_sequence_s=0.0005, prefill_base_s=0.01, prefill_per_token_s=0.0002
)
_ENGINE = EngineModelSettings(
    kv_tokens=60_000,
    max_model_len=8_192,
    max_num_seqs=16,
    max_num_batched_tokens=2_048,
    block_size=16,
    long_prefill_token_threshold=0,
)
PLANS = [
    ReplicaPlan(replica_id=name, pool="default", engine=_ENGINE, step_time=_STEP_TIME)
    for name in ("r1", "r2")
]

_LIMITS = ("pool", "max_model_len", "kv_tokens", "max_num_seqs", "max_num_batched_tokens")
REPLICAS = {
    plan.replica_id: {
        **{name: asdict(plan.spec)[name] for name in _LIMITS},
        "long_prefill_token_threshold": 0,
    }
    for plan in PLANS
}


def traffic(count: int, rate_per_s: float) -> Trace:
    """Return short chats of one tenant, and long documents of another."""
    rng, at, requests = random.Random(3), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate_per_s)
        is_long = rng.random() < 0.15
        tokens = LONG_TOKENS + rng.randrange(2_000) if is_long else 20 + rng.randrange(200)
        tenant = "<b>docs</b>" if is_long else "chat"
        output = 10 + rng.randrange(80)
        requests.append(TraceRequest(arrival_s=at, prompt_tokens=tokens, output_tokens=output, tenant=tenant))
    return Trace(name="t", source="test", requests=tuple(requests))


@lru_cache
def served(
    count: int, rate_per_s: float = 9.0, slowness: tuple[float, float] = (1.0, 1.0)
) -> list[dict[str, Any]]:
    """Return the lines of a full capture after this many requests, none of them scheduled.

    Args:
        slowness: time of an iteration of the two replicas, relative to `PLANS`.
    """
    plans = [
        replace(plan, step_time=plan.step_time.scaled(factor))
        for plan, factor in zip(PLANS, slowness, strict=True)
    ]
    simulation = Simulation(replace(SETTINGS, active_share=0.0), plans)
    records = simulation.run(list(requests_of(traffic(count, rate_per_s), Disclosure(model="m"), 16)))
    return [
        {
            "model": "m",
            "input_length": record.prompt_tokens,
            "output_length": record.output_tokens,
            "tenant": record.tenant,
            "priority": record.priority.value,
            "arrived_at": _BEGAN + record.arrived_at,
            "outcome": record.outcome.value,
            "pool": record.pool,
            "replica": record.replica,
            "cached_length": 0,
            "queue_s": record.queue_wait_s,
            "ttft_s": record.ttft_s,
            "total_s": record.e2e_s,
            "causes_s": {},
        }
        for record in sorted(records, key=lambda each: each.arrived_at)
    ]


@contextmanager
def application(
    lines: list[dict[str, Any]], *, active_share: float = 0.0, since: float = 0.0, **queue: Any
) -> Iterator[str]:
    """Serve the pages that the command reads; yield the URL."""
    pages: dict[str, dict[str, Any]] = {
        "/debug/status": {"model": "m", "pools": ["default"], "replicas": REPLICAS},
        "/debug/queue": {"model": "m", "b_short_tokens": 1, "settings": plain(SETTINGS), **queue},
        "/admin/mode": {"model": "m", "windows": [{"active_share": active_share, "since": since}]},
    }
    body = "".join(json.dumps(line) + "\n" for line in lines)

    def answer(_method: str, path: str, _headers: object) -> tuple[int, object]:
        return 200, body if path == "/debug/capture?full=true" else {"models": [pages[path]]}

    with answering(answer) as url:
        yield url
