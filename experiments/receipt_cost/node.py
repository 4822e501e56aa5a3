"""A scheduler, or a gateway before it with the only replica, in a process of its own.

The first argument is the role, the second says whether it keeps receipts. The first line on a gateway's
standard input says where its scheduler and its engine are. A scheduler's first line of output says where it
listens, a gateway's has its address. Each further line of input is answered with the process's CPU seconds.
"""

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from experiments.common.light_endpoint import MODEL
from experiments.overhead.client import KEY
from experiments.receipt_cost.without import leave_receipts_out
from experiments.tracing_cost.gateways import served
from serve_app.routing.pools import RoutingSettings
from serve_app.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.channel.messages import Role, SchedulerEndpoint
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway import ApiKey, Gateway, GatewaySettings, ServedModel
from serve_app.serving.memory import keep_memory
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions

PLACES = 16
_POOL = "all"
_ROOT = Path(__file__).resolve().parents[2]


class Node:
    """The process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def say(self, line: str) -> None:
        """Write a line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Read a line from it, in JSON."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def cpu_s(self) -> float:
        """What it has used so far."""
        self.say("cpu")
        return float(self.hear())


@contextmanager
def started_node(role: str, *, keeps_receipts: bool) -> Iterator[Node]:
    """One of them, which ends with the block."""
    command = [sys.executable, "-m", "experiments.receipt_cost.node", role, "on" if keeps_receipts else "off"]
    with subprocess.Popen(
        command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Node(process)
        finally:
            process.terminate()


async def _answer_questions() -> None:
    while await asyncio.to_thread(sys.stdin.readline):
        print(time.process_time(), flush=True)


async def _scheduler() -> None:
    settings = SchedulerSettings(
        model=MODEL,
        routing=RoutingSettings(pools=(_POOL,)),
        backpressure=BackpressureSettings(target_waiting=PLACES),
    )
    live = LiveScheduler(settings, LiveSchedulerOptions(incarnation=1, channel=ChannelSettings()))
    await live.start("127.0.0.1")
    print(json.dumps({role: asdict(live.endpoint(role)) for role in Role}), flush=True)
    await _answer_questions()


async def _gateway() -> None:
    told = json.loads(await asyncio.to_thread(sys.stdin.readline))
    endpoints = {role: SchedulerEndpoint(**told["scheduler"][role]) for role in Role}

    async def locate(role: Role) -> SchedulerEndpoint:
        return endpoints[role]

    client = GatewayClient("g", partial(locate, Role.GATEWAY), ChannelSettings())
    spec = ReplicaSpec(replica_id="r", pool=_POOL, max_model_len=32_768, kv_tokens=10**9, max_num_seqs=PLACES)
    address = ReplicaAddress(replica_id="r", pool=_POOL, host="127.0.0.1", port=told["engine_port"], token="")
    replica = ReplicaClient(spec, address, partial(locate, Role.REPLICA), _report, ChannelSettings())
    client.start()
    replica.start()
    while not client.replicas():  # noqa: ASYNC110 - before anything is measured
        await asyncio.sleep(0.01)
    gateway = Gateway(
        GatewaySettings(
            models=(ServedModel(name=MODEL, max_model_len=32_768),),
            keys=(ApiKey(tenant="bench", key=KEY),),
            # Lines would go to a terminal here.
            log_requests=False,
        ),
        {MODEL: client},
        "g",
    )
    _, url = await served(gateway)
    print(json.dumps(url), flush=True)
    await _answer_questions()


async def _report() -> ReplicaReport:
    return ReplicaReport(received=None, waiting=0, running=0, kv_usage_ratio=0.1)


if __name__ == "__main__":
    # As the deployments do.
    keep_memory()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if sys.argv[2] == "off":
        leave_receipts_out()
    uvloop.run({"scheduler": _scheduler, "gateway": _gateway}[sys.argv[1]]())
