#!/usr/bin/env python
"""What does the tuner cost a served application while it searches: how much of a core, how much latency?

    .venv/bin/python scripts/bench_tuner_cost.py --out out/tuner_cost.jsonl
    .venv/bin/python scripts/bench_tuner_cost.py --out out/tuner_cost.jsonl --pairs 1 --slice-s 20

One model with two emulated engines (profile `laptop`), a gateway, a scheduler and its tuner in mode `advise`,
which searches and tries nothing. Traffic comes at a steady rate that the engines carry without a queue, in
slices: idle, working, working, idle, and so on. In an idle slice the tuner is frozen and its last search is
over; in a working one it searches again and again, at the share of a core that it is given. So both sides
have the same processes, connections and pulls, and differ by the search alone.

Columns (means over the slices; the last line is working less idle, over pairs of neighbours, ± half the 95 %
interval of Student's t):

    grant mean ...   from the arrival at the gateway to the grant, ms: parse, submit, schedule, grant. The
                     gateway's clock counts whole milliseconds, so the mean tells more than the median
    TTFT p50, p99    at the client, from when it meant to send, ms
    tuner ...        share of a core that the process used during the slice, %

What it cannot show: anything, on a machine with less than a core to spare: a search then takes its share from
whoever else works. Client and engines share the machine; compare the sides, not the figures with others.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
import yaml

from experiments.common.application import free_port, started_application
from experiments.common.processes import CpuMeter, ProcessUse
from serve_app.bench.bodies import BodyFactory, BodySettings
from serve_app.bench.connection import ConnectionPool, Target
from serve_app.bench.load import LoadSettings, OpenLoop
from serve_app.command import positive_float, positive_int
from serve_app.errors import ServeAppError
from serve_app.metrics.confidence import interval_95
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.statistics import percentile
from serve_app.provenance import commit, hardware, load_average
from serve_app.workloads.catalog import WorkloadSettings, resolve

Row = dict[str, Any]
ROLES = ("tuner", "scheduler", "gateway")
_APPLICATION = "tuner-cost"
_MIN_REQUESTS = 100
# Below this share of a core the tuner only pulls; above the other, it searches.
_IDLE, _BUSY = 0.06, 0.12
_LOOK_S = 2.0
_TURN_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """The application under test: its address, the process of `serve run`, and Ray's folder."""

    url: str
    pid: int
    folder: Path

    def frozen(self, *, frozen: bool) -> None:
        """Let the tuner search no more, or again."""
        request = urllib.request.Request(  # noqa: S310 - the URL is our own
            f"{self.url}/debug/tuner/{'freeze' if frozen else 'thaw'}", method="POST"
        )
        with urllib.request.urlopen(request, timeout=10):  # noqa: S310 - see above
            return

    def log_lines(self) -> list[str]:
        """What the gateways have logged so far."""
        logs = self.folder.glob(f"ray/session_latest/logs/serve/replica_{_APPLICATION}_gateway*.log")
        return [line for log in logs for line in log.read_text(errors="replace").splitlines()]


def main() -> int:
    """Start, drive, write and print."""
    args = arguments()
    try:
        rows = run(args)
    except ServeAppError as exc:
        print(f"bench_tuner_cost: {exc}", file=sys.stderr)
        return 2
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    provenance = {"commit": commit(), "hardware": hardware(), "settings": settings}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"provenance": provenance}, *rows]
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{args.rate:g} requests/s, search at {args.core_share:g} of a core, {provenance['commit']}\n")
    print(table(rows))
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one for each slice")
    parser.add_argument("--pairs", type=positive_int, default=10, help="(%(default)s)")
    parser.add_argument("--slice-s", type=positive_float, default=30.0, help="(%(default)s)")
    parser.add_argument("--rate", type=positive_float, default=20.0, help="requests per s (%(default)s)")
    parser.add_argument("--core-share", type=positive_float, default=0.25, help="(%(default)s)")
    return parser.parse_args()


def run(args: argparse.Namespace) -> list[Row]:
    """All slices, in order."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(application(args.core_share)), encoding="utf-8")
        with started_application(config, Path(folder) / "serve.log") as (pid, url):
            served = Served(url, pid, ray_folder(pid))
            # The tuner needs traffic to draw from, and everything its first requests.
            play(args, served, seed=0, seconds=max(10.0, 3.0 * _MIN_REQUESTS / args.rate))
            rows = []
            for number in range(2 * args.pairs):
                working = number % 4 in (1, 2)
                turn(served, working=working)
                rows.append(one_slice(args, served, number, working=working))
                side = "working" if working else "idle"
                print(f"slice {number} {side}: tuner {rows[-1]['cpu']['tuner']:.0%}", file=sys.stderr)
            return rows


def application(core_share: float) -> dict[str, Any]:
    """One model in front of two emulated engines; its tuner searches, and tries nothing."""
    model = {
        "name": "tuned",
        "pools": [
            {
                "name": "all",
                "engine": {"emulated": {"profile": "laptop"}},
                "replicas": 2,
                "resources": {"num_cpus": 0.1},
            }
        ],
        "scheduler": {"policy": "ewsjf"},
        "tuner": {
            "parameters": {
                "profile": "laptop",
                # One search after the other, short enough that an idle slice need not wait for long.
                "every_s": 0.1,
                "min_requests": _MIN_REQUESTS,
                "search_cpu_s": 3.0,
                "core_share": core_share,
                "twin": {"window_requests": 100, "block_requests": 50},
                "study": {"rungs": [1, 2], "confirm_windows": 4, "finalists": 1},
                "rollout": {"mode": "advise", "cool_down_s": 0.0},
            }
        },
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": _APPLICATION,
                "route_prefix": "/",
                "import_path": "serve_app.app:build_app",
                "args": {"models": [model], "gateways": {"replicas": 1, "num_cpus": 0.2}},
            }
        ],
    }


def ray_folder(pid: int) -> Path:
    """Where the Ray of `serve run` keeps its logs, as its environment says."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = dict(each.partition(b"=")[::2] for each in environment)
    return Path(pairs[b"RAY_TMPDIR"].decode())


def role_of(process: ProcessUse) -> str:
    """The part that a process plays; Ray's workers carry it in their title."""
    deployment = process.title.rpartition(":")[2] if process.title.startswith("ray::ServeReplica") else ""
    return next((role for role in ROLES if deployment.startswith(role)), "other")


def turn(served: Served, *, working: bool) -> None:
    """Let the tuner begin to search, or end.

    Raises:
        ServeAppError: it does not.
    """
    served.frozen(frozen=not working)
    meter = CpuMeter([served.pid], role_of)
    deadline = time.monotonic() + _TURN_LIMIT_S
    while time.monotonic() < deadline:
        before, began = meter.read(), time.monotonic()
        time.sleep(_LOOK_S)
        share = (meter.read()["tuner"] - before["tuner"]) / (time.monotonic() - began)
        if (share >= _BUSY) if working else (share <= _IDLE):
            return
    raise ServeAppError(f"the tuner does not {'begin' if working else 'end'} to search within a while")


def one_slice(args: argparse.Namespace, served: Served, number: int, *, working: bool) -> Row:
    """Play the traffic of a slice and read what it took; neighbours of a pair meet the same traffic."""
    meter = CpuMeter([served.pid], role_of)
    logged, before, began = len(served.log_lines()), meter.read(), time.monotonic()
    records = play(args, served, seed=1 + number // 2, seconds=args.slice_s)
    seconds, after = time.monotonic() - began, meter.read()
    # The gateway's log may be written a moment later.
    time.sleep(1.0)
    grants = sorted(waits_ms(served.log_lines()[logged:]))
    ttfts = sorted(1_000 * record.ttft_s for record in records if record.ttft_s is not None)
    if not grants or not ttfts:
        raise ServeAppError(f"slice {number}: {len(grants)} grants logged, {len(ttfts)} answers")
    return {
        "slice": number,
        "working": working,
        "requests": len(records),
        "completed": sum(record.completed for record in records),
        "grant_mean_ms": statistics.fmean(grants),
        "grant_p50_ms": percentile(grants, 50),
        "grant_p99_ms": percentile(grants, 99),
        "ttft_p50_ms": percentile(ttfts, 50),
        "ttft_p99_ms": percentile(ttfts, 99),
        "cpu": {role: (after[role] - before[role]) / seconds for role in ROLES},
        "load_average": load_average(),
    }


def play(args: argparse.Namespace, served: Served, *, seed: int, seconds: float) -> Sequence[RequestRecord]:
    """Steady Poisson traffic; the same for the same seed."""
    settings = WorkloadSettings(trace="paper-mix", rate_per_s=args.rate, duration_s=seconds, seed=seed)
    return uvloop.run(drive(served, settings))


async def drive(served: Served, settings: WorkloadSettings) -> Sequence[RequestRecord]:
    """Play one trace to its end."""
    target = Target.parse(served.url)
    pool = ConnectionPool(target)
    factory = BodyFactory(BodySettings(model="tuned"), target.authority, target.path_prefix)
    try:
        return (await OpenLoop(pool, factory, LoadSettings(timeout_s=60.0)).run(resolve(settings))).records
    finally:
        pool.close()


def waits_ms(lines: Sequence[str]) -> list[float]:
    """The time to the grant of each answered request, from the gateways' log."""
    answered = (line for line in lines if "event=concluded outcome=completed" in line)
    parts = (line.partition(" queue_wait_s=")[2].partition(" ")[0] for line in answered)
    return [1_000 * float(seconds) for seconds in parts if seconds]


SIDES = {"idle": False, "working": True}
COLUMNS: dict[str, Callable[[Row], float]] = {
    "grant mean ms": lambda row: row["grant_mean_ms"],
    "p50": lambda row: row["grant_p50_ms"],
    "p99": lambda row: row["grant_p99_ms"],
    "TTFT p50 ms": lambda row: row["ttft_p50_ms"],
    "p99 ": lambda row: row["ttft_p99_ms"],
    "tuner %": lambda row: 100 * row["cpu"]["tuner"],
    "scheduler %": lambda row: 100 * row["cpu"]["scheduler"],
    "gateway %": lambda row: 100 * row["cpu"]["gateway"],
}


def table(rows: Sequence[Row]) -> str:
    """A line for each side and one for their difference."""
    lines = [["search", "slices", "requests", *(name.strip() for name in COLUMNS)]]
    sides = {side: [row for row in rows if row["working"] is working] for side, working in SIDES.items()}
    for side, found in sides.items():
        cells = [f"{statistics.fmean(map(value, found)):.2f}" for value in COLUMNS.values()]
        lines.append([side, str(len(found)), str(sum(row["requests"] for row in found)), *cells])
    neighbours = list(zip(sides["working"], sides["idle"], strict=True))
    cells = []
    for value in COLUMNS.values():
        interval = interval_95([value(working) - value(idle) for working, idle in neighbours])
        half = "" if interval.high is None else f" ± {interval.high - interval.mean:.2f}"
        cells.append(f"{interval.mean:+.2f}{half}")
    lines.append(["difference", "", "", *cells])
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|---" * len(lines[0]) + "|", *text[1:]])


if __name__ == "__main__":
    sys.exit(main())
