#!/usr/bin/env python
"""What does the application cost per request, beside the same engine with nothing in front of it?

    .venv/bin/python scripts/bench_overhead.py
    .venv/bin/python scripts/bench_overhead.py --repeats 5 --json out/overhead.json
    .venv/bin/python scripts/bench_overhead.py --speed-up 1000        an engine without delay

Starts `serve run configs/experiments/overhead.yaml` (HAProxy, gateway, scheduler, one pool replica) and, in a
process of its own, the same emulated engine behind the same HTTP server. Closed loops of 1, 16 and 64 clients
send small requests (20 prompt tokens, one token back, no stream) and streams of 32 tokens to the one and the
other in turn, so that both see the same machine.

Rows: kind of request and number of clients; medians over the repeats. Columns:

    req/s       answered per second, straight to the engine and through the application
    first ms    median time to the first token (small: to the answer) straight, and what the application adds
    gateway ... ray
                CPU ms per request by role, less what the same processes use when idle; `serve` is Serve's
                controller and proxy managers, `ray` all the rest
    total       their sum: every process of the application but the engine's
    engine      CPU ms per request of the pool replica, and of the engine alone; the difference is the
                replica's guard, reports and event loop
    reads       pieces in which an answer came through the application. A stream of 32 tokens has 35 events;
                one token at a time, as from a real engine, is the dear case. An engine without delay sends
                them in lumps, as does a machine that cannot keep up: streams then look far cheaper

What it cannot show: the network between machines, and latencies on a machine with cores to spare. Client,
engine, gateway and HAProxy share its cores, so from 16 clients on the added time is mostly waiting for one.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
import yaml

from experiments.common.application import started_application
from experiments.common.closed_loop import ClosedLoop, Exchange
from experiments.common.processes import CpuMeter, ProcessUse
from serve_app.bench.bodies import BodyFactory, BodySettings
from serve_app.bench.connection import BenchError, ConnectionPool, Target
from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.provenance import commit, hardware, load_average
from serve_app.serving.pool.server import ReplicaServer, ReplicaServerSettings
from serve_app.workloads.trace import TraceRequest

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "experiments" / "overhead.yaml"
MODEL = "instant"
CONCURRENCIES = (1, 16, 64)
IDLE_S = 10.0
ROLES = ("gateway", "haproxy", "scheduler", "serve", "ray")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request, and how many are enough for a figure."""

    name: str
    stream: bool
    output_tokens: int
    requests: dict[int, int]


KINDS = (
    Kind("small", False, 1, {1: 500, 16: 3000, 64: 3000}),
    Kind("stream", True, 32, {1: 100, 16: 1000, 64: 1000}),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One closed-loop run on one path; CPU in seconds by role over all requests, idle use taken off."""

    path: str
    kind: str
    concurrency: int
    requests: int
    seconds: float
    first_ms: float
    reads: float
    cpu_s: dict[str, float]


def role_of(process: ProcessUse) -> str:
    """The part that a process plays; Ray's workers carry it in their title."""
    if process.name == "haproxy":
        return "haproxy"
    if process.title.startswith("ray::ServeReplica"):
        deployment = process.title.rpartition(":")[2]
        if deployment == "gateway":
            return "gateway"
        return "scheduler" if deployment.startswith("scheduler") else "engine"
    of_serve = process.title.startswith(("ray::Serve", "ray::HAProxy", "ray::ProxyActor"))
    return "serve" if of_serve else "ray"


def main() -> int:
    """Run the experiment and print its table."""
    args = parse_arguments()
    if args.serve_engine is not None:
        document = yaml.safe_load(args.serve_engine.read_text(encoding="utf-8"))
        uvloop.run(serve_engine(engine_of(document)))
        return 0
    try:
        run(args)
    except BenchError as exc:
        print(f"bench_overhead: {exc}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    """Start both, measure both, print the table."""
    with (
        configured(args.speed_up) as config,
        started_application(config, args.log) as (serve, app_url),
        started_engine(config) as (engine, engine_url),
    ):
        meter = CpuMeter(
            (serve, engine), lambda process: "engine alone" if process.pid == engine else role_of(process)
        )
        measure_both(
            app_url, engine_url, meter, 1
        )  # connections, code paths and learned ratios are warm after it
        time.sleep(5)
        meter.calibrate(IDLE_S)
        idle = {role: 1000 * used for role, used in meter.idle_per_s.items()}
        print("idle, CPU ms/s: " + ", ".join(f"{role} {used:.1f}" for role, used in idle.items()))
        samples = [
            sample
            for repeat in range(args.repeats)
            for sample in measure_both(app_url, engine_url, meter, args.scale, note=f"repeat {repeat + 1}")
        ]
    print(table(samples))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(as_json(samples, idle, args), indent=1) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests (%(default)s)")
    parser.add_argument("--json", type=Path, help="write every sample, with provenance")
    parser.add_argument(
        "--log", type=Path, default=Path(os.devnull), help="where the application's output goes"
    )
    parser.add_argument(
        "--speed-up", type=float, help="of the engine (that of the configuration: 2 ms per token)"
    )
    parser.add_argument("--serve-engine", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


@contextlib.contextmanager
def configured(speed_up: float | None) -> Iterator[Path]:
    """The configuration, with the engine at this speed."""
    if speed_up is None:
        yield CONFIG
        return
    document = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    engine_of(document)["speed_up"] = speed_up
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(document, file)
        file.flush()
        yield Path(file.name)


def engine_of(document: dict[str, Any]) -> dict[str, Any]:
    """The settings of the one emulated engine in a configuration."""
    settings: dict[str, Any] = document["applications"][0]["args"]["models"][0]["pools"][0]["engine"][
        "emulated"
    ]
    return settings


@contextlib.contextmanager
def started_engine(config: Path) -> Iterator[tuple[int, str]]:
    """The engine alone, in a process of its own."""
    command = [sys.executable, __file__, "--serve-engine", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, process.stdout.readline().strip()
        finally:
            process.terminate()


async def serve_engine(settings: dict[str, Any]) -> None:
    """Serve the engine of the configuration behind the pool replica's own HTTP server; tell its URL."""
    engine = EmulatedEngine(EmulatedEngineSettings(served_model_names=(MODEL,), **settings))
    await engine.start()
    server = ReplicaServer(engine.app, "127.0.0.1", ReplicaServerSettings())
    await server.start()
    print(f"http://127.0.0.1:{server.port}", flush=True)
    await asyncio.Event().wait()


def measure_both(
    app_url: str, engine_url: str, meter: CpuMeter, scale: float, note: str = "warm-up"
) -> list[Sample]:
    """Every kind at every concurrency, straight and through the application in turn."""
    samples = []
    for kind in KINDS:
        for concurrency in CONCURRENCIES:
            requests = max(
                concurrency, round(kind.requests[concurrency] * (0.1 if note == "warm-up" else scale))
            )
            for path, url in (("straight", engine_url), ("app", app_url)):
                samples.append(measure(path, url, kind, (concurrency, requests), meter))
    print(f"{note}: load average {load_average()}", file=sys.stderr)
    return samples


def measure(path: str, url: str, kind: Kind, size: tuple[int, int], meter: CpuMeter) -> Sample:
    """One closed loop on one path; `size` is the number of clients and of requests."""
    concurrency, requests = size
    before, started_at = meter.read(), time.monotonic()
    exchanges = uvloop.run(exchange(Target.parse(url), kind, concurrency, requests))
    seconds = time.monotonic() - started_at
    return Sample(
        path,
        kind.name,
        concurrency,
        requests,
        seconds,
        1000 * statistics.median(one.first_s for one in exchanges),
        statistics.fmean(one.reads for one in exchanges),
        meter.used_since(before, seconds),
    )


async def exchange(target: Target, kind: Kind, concurrency: int, requests: int) -> list[Exchange]:
    """Send the requests and wait for all answers."""
    pool = ConnectionPool(target)
    bodies = BodyFactory(BodySettings(model=MODEL, stream=kind.stream), target.authority)
    request = TraceRequest(arrival_s=0.0, prompt_tokens=20, output_tokens=kind.output_tokens)
    return await ClosedLoop(pool, bodies, request, stream=kind.stream).run(concurrency, requests)


def table(samples: list[Sample]) -> str:
    """All rows, in columns."""
    header = [
        "kind",
        "clients",
        "req/s straight",
        "app",
        "first ms straight",
        "added",
        *ROLES,
        "total",
        "engine",
    ]
    rows = [[*header, "alone", "reads"]]
    for kind in KINDS:
        for concurrency in CONCURRENCIES:
            here = [one for one in samples if (one.kind, one.concurrency) == (kind.name, concurrency)]
            rows.append([kind.name, str(concurrency), *row_of(here)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def row_of(samples: list[Sample]) -> list[str]:
    """The figures of one kind of request at one concurrency."""
    straight = [one for one in samples if one.path == "straight"]
    app = [one for one in samples if one.path == "app"]
    added = [one.first_ms - other.first_ms for one, other in zip(app, straight, strict=True)]
    roles = {role: cpu_ms(app, (role,)) for role in ROLES}
    return [
        f"{statistics.median(one.requests / one.seconds for one in straight):,.0f}",
        f"{statistics.median(one.requests / one.seconds for one in app):,.0f}",
        f"{statistics.median(one.first_ms for one in straight):.2f}",
        f"{statistics.median(added):.2f}",
        *(f"{used:.2f}" for used in roles.values()),
        f"{cpu_ms(app, ROLES):.2f}",
        f"{cpu_ms(app, ('engine',)):.2f}",
        f"{cpu_ms(straight, ('engine alone',)):.2f}",
        f"{statistics.median(one.reads for one in app):.1f}",
    ]


def cpu_ms(samples: list[Sample], roles: tuple[str, ...]) -> float:
    """CPU milliseconds per request, median over the repeats."""
    return statistics.median(
        1000 * sum(one.cpu_s.get(role, 0.0) for role in roles) / one.requests for one in samples
    )


def as_json(samples: list[Sample], idle: dict[str, float], args: argparse.Namespace) -> dict[str, Any]:
    """Every sample, and under what circumstances it was taken."""
    return {
        "samples": [asdict(one) for one in samples],
        "idle_cpu_ms_per_s": idle,
        "provenance": {
            "commit": commit(),
            "settings": {"config": str(CONFIG.relative_to(ROOT)), "speed_up": args.speed_up},
            "hardware": hardware(),
            "load_average": load_average(),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
