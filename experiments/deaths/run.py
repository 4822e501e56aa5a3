"""What do clients hear when parts of a served application are killed, and how soon is it whole again?

One application for each kind of process, with two gateways and two short replicas. Traffic is steady and
streamed. As soon as the application is whole again, after a pause, the next process of the kind is killed.
"""

import asyncio
import contextlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import httpx
import psutil
import uvloop

from experiments.common.application import BUILD_APP, Application, serve_config, served_application
from experiments.common.audit import Ended, account, answered_twice, asked
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from serve_app.settings_base import POSITIVE, at_least, settings

# How the processes of each kind call themselves, and how many of them there are.
PROCESSES = {
    "scheduler": ("ray::ServeReplica:deaths:scheduler", 1),
    "gateway": ("ray::ServeReplica:deaths:gateway", 2),
    "short": ("ray::ServeReplica:deaths:short", 2),
    "long": ("ray::ServeReplica:deaths:long", 1),
    "tuner": ("ray::ServeReplica:deaths:tuner", 1),
    "controller": ("ray::ServeController", 1),
}
_REPLICAS = 3
_TIMEOUT_S = 60.0
_BACK_TIMEOUT_S = 120.0
_POLL_S = 0.2
_NO_LIMIT = httpx.Limits(max_connections=None)


class DeathSignal(StrEnum):
    """What a process gets: SIGKILL ends it, SIGSTOP halts it with its connections open."""

    KILL = "KILL"
    STOP = "STOP"


@settings
class DeathsCase:
    """Deaths of one kind.

    Attributes:
        kind: of process, one of `PROCESSES`.
        times: how many deaths.
    """

    kind: str
    signal: DeathSignal
    times: Annotated[int, at_least(1)]

    @property
    def key(self) -> dict[str, Any]:
        """Of its row."""
        return {"kind": self.kind, "signal": self.signal.value}


@settings
class DeathsSettings:
    """What is played.

    Attributes:
        cases: each with an application of its own.
        pause_s: mean time from a whole application to the next death.
        longest_s: a case ends after so long with fewer deaths.
    """

    cases: tuple[DeathsCase, ...]
    rate_per_s: Annotated[float, POSITIVE]
    pause_s: Annotated[float, POSITIVE]
    longest_s: Annotated[float, POSITIVE]


@dataclass(slots=True)
class DeathsPlay:
    """One application under traffic and deaths.

    Attributes:
        back_s: from each death until the application was whole; None when it took too long.
    """

    settings: DeathsSettings
    case: DeathsCase
    served: Application
    ended: list[Ended] = field(default_factory=list)
    back_s: list[float | None] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Send requests until the last death is some time ago."""
        async with httpx.AsyncClient(base_url=self.served.url, timeout=_TIMEOUT_S, limits=_NO_LIMIT) as http:
            killing = asyncio.create_task(self._kill_again_and_again())
            sent: set[asyncio.Task[None]] = set()
            number = 0
            while not killing.done():
                await asyncio.sleep(
                    max(0.0, self.began + number / self.settings.rate_per_s - time.monotonic())
                )
                task = asyncio.create_task(self._one(http, number))
                sent.add(task)
                task.add_done_callback(sent.discard)
                number += 1
            await killing
            await asyncio.gather(*sent)

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        name, started_s = f"{self.case.kind}-{number}", time.monotonic()
        # Neighbours differ in length, so that a swapped answer shows.
        end, detail = await asked(http, name, 20 + number % 180)
        self.ended.append(Ended(name, end, started_s, time.monotonic(), detail))

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
    """Whether the processes of a kind are all there and do their work."""

    def __init__(self, served: Application, kind: str) -> None:
        self._served, self._kind = served, kind
        self._incarnation = 0

    def note(self) -> None:
        """Remember the scheduler that decides now."""
        self._incarnation = self._status().get("incarnation", 0)

    def processes(self) -> list[psutil.Process]:
        """Those of the kind."""
        found = []
        for process in psutil.Process(self._served.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(PROCESSES[self._kind][0]):
                    found.append(process)
        return found

    def is_whole_without(self, victim: psutil.Process) -> bool:
        """Whether the victim has been replaced, and by one that works as far as a scheduler can tell."""
        found = self.processes()
        return victim not in found and len(found) >= PROCESSES[self._kind][1] and self._works()

    def _works(self) -> bool:
        status = self._status()
        if not status:
            return False
        fresh = [each for each in status["replicas"].values() if each["report"] and not each["stale"]]
        newer = self._kind != "scheduler" or status["incarnation"] > self._incarnation
        return newer and len(fresh) == _REPLICAS and status["gateways"] == PROCESSES["gateway"][1]

    def _status(self) -> dict[str, Any]:
        """The scheduler's; empty while it does not answer."""
        try:
            document: dict[str, Any] = json.loads(self._served.fetched("/debug/status"))["models"][0]
        except (OSError, ValueError, KeyError, IndexError):
            return {}
        return document if "replicas" in document else {}


async def _until_whole(state: ApplicationState, victim: psutil.Process, since: float) -> float | None:
    """How long it took; None when it took too long, and the victim has got a SIGKILL in the end."""
    while time.monotonic() < since + _BACK_TIMEOUT_S:
        if await asyncio.to_thread(state.is_whole_without, victim):
            return time.monotonic() - since
        await asyncio.sleep(_POLL_S)
    with contextlib.suppress(psutil.Error):
        victim.kill()
    return None


def play(settings: DeathsSettings, context: Context) -> Iterator[Measurement]:
    """Each kind with an application of its own."""
    for case in settings.cases:
        if context.has(case.key):
            continue
        with served_application(_config()) as served:
            played = DeathsPlay(settings, case, served)
            uvloop.run(played.run())
            # Lines of the log come a little later than the answers.
            time.sleep(2.0)
            figures = figures_of(played)
        yield Measurement(key=case.key, figures=figures, seeds=(0,), traces=generated("steady traffic"))


def figures_of(played: DeathsPlay) -> dict[str, Any]:
    """How requests ended, what clients heard besides, and how soon the killed process was replaced."""
    details = Counter(f"{one.end}: {one.detail}" for one in played.ended if one.detail)
    return {
        "deaths": len(played.back_s),
        "sent": len(played.ended),
        "ends": account(played.ended),
        "answered_twice": answered_twice(played.served.log_lines("gateway"), f"{played.case.kind}-"),
        "back_s": played.back_s,
        "slowest_s": max(one.ended_s - one.started_s for one in played.ended),
        "details": dict(details.most_common(10)),
    }


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


EXPERIMENT = Experiment(settings=DeathsSettings, play=play, only_by_name="it takes two hours: name it")
