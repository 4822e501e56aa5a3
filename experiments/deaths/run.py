"""What do clients see when parts of a served application are killed, and how soon has it recovered?

There is one application for each kind of process, with two gateways and two short replicas. Traffic is steady
and streamed. Once the application is complete again, and after a pause, the next process of the kind is
killed. Nodes die in separate clusters, see `nodes`.
"""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import uvloop

from experiments.common.application import Application, is_whole, serve_config, served_application
from experiments.common.audit import NO_LIMIT, SteadyTraffic
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.processes import titled
from experiments.common.provenance import generated
from experiments.deaths.nodes import KINDS, play_nodes
from experiments.deaths.traffic import (
    LENGTHS,
    LOG_DELAY_S,
    TIMEOUT_S,
    DeathsCase,
    DeathsSettings,
    figures_of,
)

# Process title and number of processes of each kind.
PROCESSES = {
    "scheduler": ("ray::ServeReplica:deaths:scheduler", 1),
    "gateway": ("ray::ServeReplica:deaths:gateway", 2),
    "short": ("ray::ServeReplica:deaths:short", 2),
    "long": ("ray::ServeReplica:deaths:long", 1),
    "tuner": ("ray::ServeReplica:deaths:tuner", 1),
    "controller": ("ray::ServeController", 1),
}
_REPLICAS = 3
_BACK_TIMEOUT_S = 120.0
_POLL_S = 0.2


@dataclass(slots=True)
class DeathsPlay:
    """One application under traffic and deaths.

    Attributes:
        back_s: time from each death until the application was complete; None if it took too long.
    """

    settings: DeathsSettings
    case: DeathsCase
    served: Application
    traffic: SteadyTraffic | None = None
    back_s: list[float | None] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Send requests until some time after the last death."""
        async with httpx.AsyncClient(base_url=self.served.url, timeout=TIMEOUT_S, limits=NO_LIMIT) as http:
            self.traffic = SteadyTraffic(self.case.kind, self.settings.rate_per_s, lambda: http, LENGTHS)
            await self.traffic.run_beside(self._kill_again_and_again())

    async def _kill_again_and_again(self) -> None:
        chance = random.Random(self.case.kind)  # noqa: S311 - which of several processes, and when
        state = ApplicationState(self.served, self.case.kind)
        while len(self.back_s) < self.case.times and time.monotonic() < self.began + self.settings.longest_s:
            await asyncio.sleep(self.settings.pause_s * chance.uniform(0.5, 1.5))
            victim = chance.choice(await asyncio.to_thread(state.processes))
            state.note()
            victim.send_signal(signal.Signals[f"SIG{self.case.signal}"])
            self.back_s.append(await _until_whole(state, victim, time.monotonic()))
        await asyncio.sleep(self.settings.pause_s)


class ApplicationState:
    """Checks whether all processes of a kind exist and work."""

    def __init__(self, served: Application, kind: str) -> None:
        self._served, self._kind = served, kind
        self._incarnation = 0

    def note(self) -> None:
        """Remember the current scheduler."""
        self._incarnation = self._served.status().get("incarnation", 0)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the kind."""
        return [process for process, _ in titled(self._served.pid, PROCESSES[self._kind][0])]

    def is_whole_without(self, victim: psutil.Process) -> bool:
        """Return whether the victim has a replacement that works as far as a scheduler can tell."""
        found = self.processes()
        return victim not in found and len(found) >= PROCESSES[self._kind][1] and self._works()

    def _works(self) -> bool:
        status = self._served.status()
        newer = self._kind != "scheduler" or status.get("incarnation", 0) > self._incarnation
        return newer and is_whole(status, _REPLICAS, PROCESSES["gateway"][1])


async def _until_whole(state: ApplicationState, victim: psutil.Process, since: float) -> float | None:
    """Return the seconds until complete; if that takes too long, kill the victim and return None."""
    while time.monotonic() < since + _BACK_TIMEOUT_S:
        if await asyncio.to_thread(state.is_whole_without, victim):
            return time.monotonic() - since
        await asyncio.sleep(_POLL_S)
    with contextlib.suppress(psutil.Error):
        victim.kill()
    return None


def play(settings: DeathsSettings, context: Context) -> Iterator[Measurement]:
    """Measure each kind with a new application."""
    for case in settings.cases:
        if context.has(case.key):
            continue
        figures = (play_nodes if case.kind in KINDS else _play_processes)(settings, case)
        yield Measurement(key=case.key, figures=figures, seeds=(0,), traces=generated("steady traffic"))


def _play_processes(settings: DeathsSettings, case: DeathsCase) -> dict[str, Any]:
    with served_application(_config(case)) as served:
        played = DeathsPlay(settings, case, served)
        uvloop.run(played.run())
        # Log lines follow the answers a little later.
        time.sleep(LOG_DELAY_S)
        assert played.traffic is not None
        return figures_of(played.traffic, played.back_s, served.log_lines("gateway"))


def _config(case: DeathsCase) -> dict[str, Any]:
    def pool(name: str, longest: int, replicas: int) -> dict[str, Any]:
        return {
            "name": name,
            "engine": {"emulated": {"profile": "laptop", "max_model_len": longest}},
            "replicas": replicas,
            "resources": {"num_cpus": 0.1},
        }

    pools = [pool("short", 2048, 2), pool("long", 8192, 1)]
    # The tuner starts with the first requests, so that it can be killed.
    tuner = {"advanced": {"learn_from": 2}}
    models = [{"name": "demo", "pools": pools, "resume_streams": case.resume_streams, "tuner": tuner}]
    return serve_config("deaths", {"models": models, "gateways": {"replicas": 2, "num_cpus": 0.1}})


EXPERIMENT = Experiment(settings=DeathsSettings, play=play, only_by_name="it takes an hour: name it")
