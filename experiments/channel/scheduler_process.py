"""A scheduler in a process of its own, as it is in its actor: real core, FCFS, one pool."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import uvloop

from serve_app.routing.pools import RoutingSettings
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.dispatch.backpressure import BackpressureSettings
from serve_app.serving.channel.messages import Role, SchedulerEndpoint
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions

POOL = "short"
MODEL = "m"
_ROOT = Path(__file__).resolve().parents[2]
_UNLIMITED = 1_000_000


@contextlib.contextmanager
def started_scheduler() -> Iterator[tuple[int, dict[Role, SchedulerEndpoint]]]:
    """Yields its process id and where it listens, for each role."""
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.channel.scheduler_process"],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        told = json.loads(process.stdout.readline())
        yield process.pid, {role: SchedulerEndpoint(**told[role]) for role in Role}
    finally:
        process.stdin.close()
        process.wait(10)


async def _serve() -> None:
    """Tell the endpoint, and serve until the input ends."""
    settings = SchedulerSettings(
        model=MODEL,
        routing=RoutingSettings(pools=(POOL,)),
        max_waiting=_UNLIMITED,
        # The channel is measured, so a replica may be sent as much as is asked for.
        backpressure=BackpressureSettings(target_waiting=_UNLIMITED),
    )
    scheduler = LiveScheduler(settings, LiveSchedulerOptions(incarnation=1, channel=ChannelSettings()))
    await scheduler.start("127.0.0.1")
    print(json.dumps({role: asdict(scheduler.endpoint(role)) for role in Role}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    scheduler.stop()


if __name__ == "__main__":
    uvloop.run(_serve())
