#!/usr/bin/env python
"""What does the control channel cost, from a gateway's `acquire` to its grant, and what can it carry?

    .venv/bin/python scripts/bench_channel.py
    .venv/bin/python scripts/bench_channel.py --loop asyncio --json OUT.json

A scheduler (real core, FCFS, one pool) runs in a process of its own, as it does in its actor; this process
is one gateway and one replica. A request is `acquire`, then `first_token`, then `finished`: three messages
there, one back. Rows:

    idle      one request after the other with 2 ms between them: latency without any company
    c=1       one after the other without pauses
    c=N       N handlers, each one after the other
    queued    all at once, while few may run: grants under queueing

Columns:

    grants/s       requests per second of wall clock
    p50, p99 ms    from `acquire` to the grant; in the last row that is the time in the queue
    gateway        CPU ms of this process per request, its own handlers included
    scheduler      CPU ms of the scheduler's process per request, the core included

What it cannot show: other processes on the same machine make every figure worse; wall-clock figures need at
least two idle cores. The network is the loopback.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from serve_app.errors import Outcome
from serve_app.provenance import commit, hardware, load_average
from serve_app.request import PromptShape, Usage
from serve_app.routing.pools import RoutingSettings
from serve_app.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.channel.messages import SchedulerEndpoint
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import Grant, ReplicaAddress, Submission
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions

USAGE = Usage(prompt_tokens=100, output_tokens=10)
SHAPE = PromptShape(text_bytes=400, messages=2)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; times as the columns say."""

    name: str
    requests: int
    grants_per_s: float
    p50_ms: float
    p99_ms: float
    gateway_cpu_ms: float
    scheduler_cpu_ms: float


def main() -> None:
    """Run the scheduler's side or the bench itself."""
    arguments = parse()
    side = serve() if arguments.serve else bench(arguments)
    if arguments.loop == "uvloop":
        uvloop.run(side)
    else:
        asyncio.run(side)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000, help="requests in each row with company")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--json", type=Path, help="write the rows and where they come from")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


async def serve() -> None:
    """Be the scheduler's process: print the endpoint, serve until the input ends."""
    settings = SchedulerSettings(
        model="m",
        routing=RoutingSettings(pools=("short",)),
        max_waiting=1_000_000,
        # The bench measures the channel, so a replica may be sent as much as the rows ask for.
        backpressure=BackpressureSettings(target_waiting=1_000_000),
    )
    shell = LiveScheduler(settings, LiveSchedulerOptions(incarnation=1, channel=ChannelSettings()))
    endpoint = await shell.start("127.0.0.1")
    sys.stdout.write(json.dumps(asdict(endpoint)) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    shell.stop()


class Bench:
    """One gateway, one replica, and a stop-watch."""

    def __init__(self, endpoint: SchedulerEndpoint, scheduler_pid: int) -> None:
        async def locate() -> SchedulerEndpoint:
            return endpoint

        self._scheduler_pid = scheduler_pid
        self._serial = 0
        self.gateway = GatewayClient("bench", locate, ChannelSettings())
        spec = ReplicaSpec(
            replica_id="s1", pool="short", max_model_len=100_000, kv_tokens=10**12, max_num_seqs=10**6
        )
        address = ReplicaAddress(replica_id="s1", pool="short", host="127.0.0.1", port=1, token="t")  # noqa: S106 - nobody listens there
        self.replica = ReplicaClient(spec, address, locate, self._load, ChannelSettings())

    async def start(self) -> None:
        """Connect both, and wait for the first report."""
        self.gateway.start()
        self.replica.start()
        while not self.gateway.replicas():  # noqa: ASYNC110 - before anything is measured
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)

    async def close(self) -> None:
        """Say goodbye."""
        await self.replica.close()
        await self.gateway.close()

    async def row(self, name: str, requests: int, handlers: int, pause_s: float = 0.0) -> Row:
        """Serve so many requests with so many handlers, and measure."""
        waits: list[float] = []
        each = requests // handlers
        cpu_here, cpu_there, began = time.process_time(), cpu_s(self._scheduler_pid), time.perf_counter()
        await asyncio.gather(*(self._handler(each, pause_s, waits) for _ in range(handlers)))
        took_s = time.perf_counter() - began
        count = each * handlers
        waits.sort()
        return Row(
            name,
            count,
            count / took_s,
            1e3 * waits[count // 2],
            1e3 * waits[int(count * 0.99)],
            1e3 * (time.process_time() - cpu_here) / count,
            1e3 * (cpu_s(self._scheduler_pid) - cpu_there) / count,
        )

    async def _handler(self, requests: int, pause_s: float, waits: list[float]) -> None:
        for _ in range(requests):
            self._serial += 1
            request_id = f"bench-{self._serial}"
            submission = Submission(request_id=request_id, model="m", shape=SHAPE, max_output_tokens=10)
            began = time.perf_counter()
            answer = await self.gateway.acquire(submission)
            waits.append(time.perf_counter() - began)
            assert isinstance(answer, Grant), answer
            self.gateway.first_token(request_id)
            self.gateway.finish(request_id, Outcome.COMPLETED, USAGE)
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _load(self) -> ReplicaReport:
        return ReplicaReport(received=self._serial, waiting=0, running=0, kv_usage_ratio=0.0)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def bench(arguments: argparse.Namespace) -> None:
    """Start the scheduler's process, run all rows, print the table."""
    command = [sys.executable, __file__, "--serve", "--loop", arguments.loop]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - before anything is measured
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        endpoint = SchedulerEndpoint(**json.loads(process.stdout.readline()))
        rows = await all_rows(Bench(endpoint, process.pid), arguments)
    finally:
        process.stdin.close()
        process.wait(10)
    show(rows)
    if arguments.json:
        provenance = {
            "commit": commit(),
            "settings": vars(arguments),
            "hardware": hardware(),
            "load_average": load_average(),
        }
        result = {"rows": [asdict(row) for row in rows], "provenance": provenance}
        arguments.json.write_text(json.dumps(result, indent=2, default=str) + "\n")


async def all_rows(bench: Bench, arguments: argparse.Namespace) -> list[Row]:
    """Run the rows in order, one warm-up before them."""
    await bench.start()
    wanted: list[Coroutine[Any, Any, Row]] = [
        bench.row("warm-up", 2_000, 16),
        bench.row("idle", 1_000, 1, pause_s=0.002),
        bench.row("c=1", arguments.requests // 10, 1),
        *(bench.row(f"c={n}", arguments.requests, n) for n in arguments.concurrency),
        bench.row("queued", arguments.requests, arguments.requests),
    ]
    rows = [await row for row in wanted]
    await bench.close()
    return rows[1:]


def show(rows: list[Row]) -> None:
    """Print the table."""
    print(
        f"{'':>8} {'requests':>9} {'grants/s':>9} {'p50 ms':>8} {'p99 ms':>8} {'gateway':>8} {'scheduler':>9}"
    )
    for row in rows:
        print(
            f"{row.name:>8} {row.requests:>9,} {row.grants_per_s:>9,.0f} {row.p50_ms:>8.3f} "
            f"{row.p99_ms:>8.3f} {row.gateway_cpu_ms:>8.3f} {row.scheduler_cpu_ms:>9.3f}"
        )


if __name__ == "__main__":
    main()
