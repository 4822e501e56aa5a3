#!/usr/bin/env python
"""One user sends 200 requests at once, two others one each a moment later: when are they served? Live.

    .venv/bin/python scripts/bench_late_users.py
    .venv/bin/python scripts/bench_late_users.py --repeats 5 --policy fcfs

Starts one application with a model for each way to count service (`fairness.mode`), each with an emulated
engine of its own, and plays the scenario against all of them in turn, over HTTP, with streamed answers.

Columns (means over the repeats, and the worst):

    TTFT of B, C     from when their client meant to send, in seconds
    TTFT of A        mean over its 200 requests
    before B         requests of A that were dispatched before B
    in engines       those of them that had been dispatched when B came: B could not pass these any more
    after its turn   `before B` less `in engines`: 0 is right after what engines had already

A dispatch's time is the client's own plus `x-queue-wait-ms` of the answer. Client, gateway and engine share
the machine, so the times have its noise; the places in the queue have not.

Scenario: TNG, "Efficient Request Queueing".
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import uvloop
import yaml

from experiments.common.application import free_port, started_application
from serve_app.bench.bodies import BenchEndpoint, BodyFactory, BodyKind, BodySettings
from serve_app.bench.connection import ConnectionPool, Target
from serve_app.bench.load import LoadSettings, OpenLoop
from serve_app.command import positive_float, positive_int
from serve_app.errors import ServeAppError
from serve_app.metrics.record import RequestRecord
from serve_app.provenance import load_average
from serve_app.workloads.trace import Trace, TraceRequest

MODES = {"off": "none", "requests": "round-robin", "tokens": "tokens"}


@dataclass(frozen=True)
class Figures:
    """What came of one play."""

    late_s: tuple[float, float]
    flood_s: float
    before: int
    in_engines: int


def main() -> int:
    """Start, play and print."""
    args = arguments()
    try:
        played = run(args)
    except ServeAppError as exc:
        print(f"bench_late_users: {exc}", file=sys.stderr)
        return 1
    print(f"policy {args.policy}, {args.flood} requests of A, load average {load_average()}\n")
    print(table(played))
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="fcfs", help="(%(default)s)")
    parser.add_argument("--flood", type=positive_int, default=200, help="requests of A (%(default)s)")
    parser.add_argument(
        "--after", type=positive_float, default=0.5, help="seconds until B comes (%(default)s)"
    )
    parser.add_argument("--repeats", type=positive_int, default=3, help="(%(default)s)")
    return parser.parse_args()


def run(args: argparse.Namespace) -> dict[str, list[Figures]]:
    """All plays, by mode."""
    played: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(application(args.policy)), encoding="utf-8")
        with started_application(config, Path(folder) / "serve.log") as (_, url):
            target = Target.parse(url)
            for _repeat in range(args.repeats):
                for mode in MODES:
                    records = uvloop.run(drive(target, mode, scenario(args.flood, args.after)))
                    played[mode].append(figures(records))
    return played


def application(policy: str) -> dict[str, Any]:
    """A model for each mode, in front of one emulated engine each."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "late-users",
                "route_prefix": "/",
                "import_path": "serve_app.app:build_app",
                "args": {
                    "models": [model(mode, policy) for mode in MODES],
                    "gateways": {"replicas": 1, "num_cpus": 0.2},
                },
            }
        ],
    }


def model(mode: str, policy: str) -> dict[str, Any]:
    """One way to count service."""
    return {
        "name": mode,
        "pools": [
            {
                "name": "all",
                "engine": {"emulated": {"profile": "laptop", "long_prefill_token_threshold": 192}},
                "resources": {"num_cpus": 0.1},
            }
        ],
        "scheduler": {"policy": policy, "fairness": {"mode": mode}},
    }


def scenario(flood: int, after_s: float) -> Trace:
    """A's requests at once, then B's and C's."""
    requests = [TraceRequest(arrival_s=0.0, prompt_tokens=100, output_tokens=60, tenant="A")] * flood
    late = [
        TraceRequest(arrival_s=after_s + 0.05 * number, prompt_tokens=100, output_tokens=60, tenant=tenant)
        for number, tenant in enumerate("BC")
    ]
    return Trace(name="late users", source="the article's scenario", requests=(*requests, *late))


async def drive(target: Target, mode: str, trace: Trace) -> list[RequestRecord]:
    """Play the scenario against one model."""
    pool = ConnectionPool(target)
    bodies = BodySettings(model=mode, kind=BodyKind.TEXT, endpoint=BenchEndpoint.COMPLETIONS, ignore_eos=True)
    try:
        loop = OpenLoop(pool, BodyFactory(bodies, target.authority), LoadSettings(timeout_s=300.0))
        result = await loop.run(trace)
    finally:
        pool.close()
    failed = [record for record in result.records if not record.completed]
    if failed:
        raise ServeAppError(f"{len(failed)} requests did not complete, the first: {failed[0].detail}")
    return result.records


def figures(records: Sequence[RequestRecord]) -> Figures:
    """Who was served when."""
    of = {tenant: [one for one in records if one.tenant == tenant] for tenant in "ABC"}
    (b,), (c,) = of["B"], of["C"]
    dispatched = [dispatched_at(one) for one in of["A"]]
    return Figures(
        late_s=(b.ttft_s or 0.0, c.ttft_s or 0.0),
        flood_s=fmean(one.ttft_s or 0.0 for one in of["A"]),
        before=sum(at < dispatched_at(b) for at in dispatched),
        in_engines=sum(at < (b.sent_at or b.arrived_at) for at in dispatched),
    )


def dispatched_at(record: RequestRecord) -> float:
    """When it left the queue."""
    if record.dispatched_at is None:
        raise ServeAppError(f"request {record.request_id} tells no queue wait: is this our gateway?")
    return record.dispatched_at


def table(played: dict[str, list[Figures]]) -> str:
    """Markdown: a line for each mode."""
    lines = [
        "| fairness | TTFT of B | of C | worst of both | of A | before B | in engines | after its turn |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mode, plays in played.items():
        worst = max(max(play.late_s) for play in plays)
        cells = [
            f"{MODES[mode]} (`{mode}`)",
            f"{fmean(play.late_s[0] for play in plays):.3f}",
            f"{fmean(play.late_s[1] for play in plays):.3f}",
            f"{worst:.3f}",
            f"{fmean(play.flood_s for play in plays):.2f}",
            f"{fmean(play.before for play in plays):.1f}",
            f"{fmean(play.in_engines for play in plays):.1f}",
            f"{fmean(play.before - play.in_engines for play in plays):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
