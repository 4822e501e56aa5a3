"""What do clients hear when parts of a served application are killed, and how soon is it whole again?

One application for each kind of process, with two gateways and two short replicas. Traffic is steady and
streamed. Every so often a process of the kind gets SIGKILL.
"""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import uvloop

from experiments.common.application import BUILD_APP, Application, serve_config, served_application
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.deaths.audit import Ended, account, asked
from serve_app.settings_base import settings

# How the processes of each kind call themselves.
PROCESSES = {
    "scheduler": "ray::ServeReplica:deaths:scheduler",
    "gateway": "ray::ServeReplica:deaths:gateway",
    "short": "ray::ServeReplica:deaths:short",
    "long": "ray::ServeReplica:deaths:long",
    "tuner": "ray::ServeReplica:deaths:tuner",
    "controller": "ray::ServeController",
}
_TIMEOUT_S = 60.0
_BACK_TIMEOUT_S = 60.0
_POLL_S = 0.1
_NO_LIMIT = httpx.Limits(max_connections=None)


@settings
class DeathsSettings:
    """What is played.

    Attributes:
        kinds: of processes, each with an application of its own.
        kills: of each kind.
        every_s: between two kills.
    """

    kinds: tuple[str, ...]
    kills: int
    rate_per_s: float
    every_s: float


@dataclass(slots=True)
class Play:
    """One application under traffic and kills."""

    settings: DeathsSettings
    kind: str
    served: Application
    ended: list[Ended] = field(default_factory=list)
    back_s: list[float | None] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Send requests until the last kill is some time ago."""
        seconds = self.settings.every_s * (self.settings.kills + 1)
        async with httpx.AsyncClient(base_url=self.served.url, timeout=_TIMEOUT_S, limits=_NO_LIMIT) as http:
            killing = asyncio.create_task(self._kill_again_and_again())
            sent = [
                asyncio.create_task(self._one(http, number))
                for number in range(round(seconds * self.settings.rate_per_s))
            ]
            await asyncio.gather(killing, *sent)

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(number / self.settings.rate_per_s)
        name, started_s = f"{self.kind}-{number}", time.monotonic()
        # Neighbours differ in length, so that a swapped answer shows.
        end, detail = await asked(http, name, 20 + number % 180)
        self.ended.append(Ended(name, end, started_s, time.monotonic(), detail))

    async def _kill_again_and_again(self) -> None:
        chance = random.Random(self.kind)  # noqa: S311 - which of several processes
        for number in range(1, self.settings.kills + 1):
            due = self.began + number * self.settings.every_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            before = self._processes()
            victim = chance.choice(before)
            victim.kill()
            killed_at = time.monotonic()
            self.back_s.append(await self._until_back(len(before), victim.pid, killed_at))

    async def _until_back(self, count: int, pid: int, killed_at: float) -> float | None:
        """How long until there are as many processes as before; None when it took too long."""
        while time.monotonic() < killed_at + _BACK_TIMEOUT_S:
            found = await asyncio.to_thread(self._processes)
            if len(found) >= count and pid not in {process.pid for process in found}:
                return time.monotonic() - killed_at
            await asyncio.sleep(_POLL_S)
        return None

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.served.pid).children(recursive=True):
            try:
                if " ".join(process.cmdline()).startswith(PROCESSES[self.kind]):
                    found.append(process)
            except psutil.Error:
                continue
        return found


def play(settings: DeathsSettings, context: Context) -> Iterator[Measurement]:
    """Each kind with an application of its own."""
    for kind in settings.kinds:
        if context.has({"kind": kind}):
            continue
        with served_application(_config()) as served:
            played = Play(settings, kind, served)
            uvloop.run(played.run())
            # Lines of the log come a little later than the answers.
            time.sleep(2.0)
            figures = figures_of(played)
        yield Measurement(key={"kind": kind}, figures=figures, seeds=(0,), traces=generated("steady traffic"))


def figures_of(played: Play) -> dict[str, Any]:
    """How requests ended, what clients heard besides, and how soon the killed process was replaced."""
    details = Counter(f"{one.end}: {one.detail}" for one in played.ended if one.detail)
    return {
        "kills": len(played.back_s),
        "sent": len(played.ended),
        "ends": account(played.ended),
        "answered_twice": answered_twice(played.served.log_lines("gateway"), played.kind),
        "back_s": played.back_s,
        "slowest_s": max(one.ended_s - one.started_s for one in played.ended),
        "details": dict(details.most_common(10)),
    }


def answered_twice(lines: list[str], kind: str) -> int:
    """Requests that gateways say to have completed more than once."""
    completed = (
        re.search(r"event=concluded outcome=completed .* client_request_id=(\S+)", line) for line in lines
    )
    counts = Counter(found[1] for found in completed if found and found[1].startswith(f"{kind}-"))
    return sum(count > 1 for count in counts.values())


def _config() -> dict[str, Any]:
    def pool(name: str, longest: int, replicas: int) -> dict[str, Any]:
        return {
            "name": name,
            "engine": {"emulated": {"profile": "laptop", "max_model_len": longest}},
            "replicas": replicas,
            "resources": {"num_cpus": 0.1},
        }

    models = [{"name": "demo", "pools": [pool("short", 2048, 2), pool("long", 8192, 1)]}]
    return serve_config("deaths", models, BUILD_APP, 0, {"replicas": 2, "num_cpus": 0.1})


EXPERIMENT = Experiment(settings=DeathsSettings, play=play)
