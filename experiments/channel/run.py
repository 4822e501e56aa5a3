"""What does the control channel cost, from a gateway's `acquire` to its grant, and what can it carry?

A scheduler runs in a process of its own; this process is one gateway and one replica. A request is `acquire`,
then `first_token`, then `finish`: three messages there, one back.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from functools import partial

import uvloop

from experiments.channel.scheduler_process import MODEL, POOL, started_scheduler
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.processes import process_tree
from experiments.common.provenance import generated
from serve_app.command import progress_bar
from serve_app.errors import Outcome
from serve_app.metrics.statistics import percentile
from serve_app.request import PromptShape, RequestSpec, Submission, Usage
from serve_app.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.serving.channel.gateway_client import GatewayClient
from serve_app.serving.channel.messages import Role, SchedulerEndpoint
from serve_app.serving.channel.replica_client import ReplicaClient
from serve_app.serving.channel.scheduler_client import Grant, ReplicaAddress
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.settings_base import settings

_USAGE = Usage(prompt_tokens=100, output_tokens=10)
_SPEC = RequestSpec(model=MODEL, shape=PromptShape(text_bytes=400, messages=2), max_output_tokens=10)


@settings
class Traffic:
    """Requests of so many handlers, each one after the other.

    Attributes:
        pause_s: of each handler, between two requests.
    """

    requests: int
    handlers: int
    pause_s: float = 0.0


@settings
class ChannelExperimentSettings:
    """What is played.

    Attributes:
        traffic: by the name that it has in the table.
        repeats: of all traffics in turn.
    """

    warm_up: Traffic
    traffic: Mapping[str, Traffic]
    repeats: int


class Gateway:
    """One gateway and one replica, and a stop-watch."""

    def __init__(self, endpoints: Mapping[Role, SchedulerEndpoint], scheduler_pid: int) -> None:
        async def locate(role: Role) -> SchedulerEndpoint:
            return endpoints[role]

        self._scheduler_pid = scheduler_pid
        self._serial = 0
        self._client = GatewayClient("experiment", partial(locate, Role.GATEWAY), ChannelSettings())
        spec = ReplicaSpec(
            replica_id="s1", pool=POOL, max_model_len=100_000, kv_tokens=10**12, max_num_seqs=10**6
        )
        address = ReplicaAddress(replica_id="s1", pool=POOL, host="127.0.0.1", port=1, token="t")  # noqa: S106 - nobody listens there
        find = partial(locate, Role.REPLICA)
        self._replica = ReplicaClient(spec, address, find, self._report, ChannelSettings())

    async def start(self) -> None:
        """Connect both, and wait for the first report."""
        self._client.start()
        self._replica.start()
        while not self._client.replicas():  # noqa: ASYNC110 - before anything is measured
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)

    async def close(self) -> None:
        """Leave the scheduler."""
        await self._replica.close()
        await self._client.close()

    async def measure(self, traffic: Traffic) -> dict[str, float]:
        """Send the requests; CPU time is per request, with the handlers' own in that of the gateway."""
        waits_s: list[float] = []
        each = traffic.requests // traffic.handlers
        here_s, there_s, began = time.process_time(), self._scheduler_cpu_s(), time.perf_counter()
        handlers = (self._handler(each, traffic.pause_s, waits_s) for _ in range(traffic.handlers))
        await asyncio.gather(*handlers)
        seconds, count = time.perf_counter() - began, each * traffic.handlers
        waits_s.sort()
        return {
            "grants_per_s": count / seconds,
            "p50_ms": 1_000 * percentile(waits_s, 50),
            "p99_ms": 1_000 * percentile(waits_s, 99),
            "gateway_cpu_ms": 1_000 * (time.process_time() - here_s) / count,
            "scheduler_cpu_ms": 1_000 * (self._scheduler_cpu_s() - there_s) / count,
        }

    async def _handler(self, requests: int, pause_s: float, waits_s: list[float]) -> None:
        for _ in range(requests):
            self._serial += 1
            request_id = f"r{self._serial}"
            began = time.perf_counter()
            answer = await self._client.acquire(Submission(request_id=request_id, spec=_SPEC))
            waits_s.append(time.perf_counter() - began)
            assert isinstance(answer, Grant), answer
            self._client.first_token(request_id)
            self._client.finish(request_id, Outcome.COMPLETED, _USAGE)
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _report(self) -> ReplicaReport:
        return ReplicaReport(received=self._serial, waiting=0, running=0, kv_usage_ratio=0.0)

    def _scheduler_cpu_s(self) -> float:
        return process_tree(self._scheduler_pid)[0].cpu_s


def play(settings: ChannelExperimentSettings, context: Context) -> Iterator[Measurement]:
    """All traffics in turn, repeat by repeat."""
    if all(context.has({"traffic": name}) for name in settings.traffic):
        return
    with started_scheduler() as (pid, endpoints):
        played = uvloop.run(_play(settings, endpoints, pid))
    for name, runs in played.items():
        figures = {figure: [run[figure] for run in runs] for figure in runs[0]}
        yield Measurement(key={"traffic": name}, figures=figures, traces=generated("requests of one size"))


async def _play(
    settings: ChannelExperimentSettings, endpoints: Mapping[Role, SchedulerEndpoint], pid: int
) -> dict[str, list[dict[str, float]]]:
    gateway = Gateway(endpoints, pid)
    await gateway.start()
    await gateway.measure(settings.warm_up)
    played: dict[str, list[dict[str, float]]] = {name: [] for name in settings.traffic}
    with progress_bar("channel", settings.repeats * len(played)) as advance:
        for _repeat in range(settings.repeats):
            for name, runs in played.items():
                runs.append(await gateway.measure(settings.traffic[name]))
                advance()
    await gateway.close()
    return played


EXPERIMENT = Experiment(settings=ChannelExperimentSettings, play=play)
