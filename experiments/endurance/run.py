"""Is anything lost, or does anything grow, under overload, among clients that leave, and for half an hour?

One application with two gateways and three small replicas, and what it answers at full load as the measure of
all rates. Every request is accounted for; memory and descriptors of every process are read once a minute.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import uvloop

from experiments.common.application import BUILD_APP, Application, serve_config, served_application
from experiments.common.audit import Ended, account, answered_twice, asked, body_of
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.endurance.footprint import Footprint, growth, read_footprint
from serve_app.settings_base import NOT_NEGATIVE, POSITIVE, at_least, settings

_TIMEOUT_S = 90.0
_NO_LIMIT = httpx.Limits(max_connections=None)
# More than all replicas hold, so that they are full.
_WARM_UP_CLIENTS = 16
# Long enough to be served under little load; under overload some wait in vain.
_QUEUE_TIMEOUT_S = 20.0
_SAMPLE_S = 60.0
_LEAVES_WITHIN_S = 2.0
_SETTLE_S = 15.0


@settings
class EndurancePhase:
    """One kind of traffic.

    Attributes:
        load: rate of ordinary requests, as a share of what is answered at full load.
        longer: how many times as long answers are; fewer requests make the load then, and a client keeps up.
        seconds: how long; 0 until all disconnects are done.
        disconnects: clients that leave at a random moment, beside the ordinary requests.
    """

    name: str
    load: Annotated[float, POSITIVE]
    longer: Annotated[int, at_least(1)] = 1
    seconds: Annotated[float, NOT_NEGATIVE] = 0.0
    disconnects: Annotated[int, NOT_NEGATIVE] = 0
    disconnects_per_s: Annotated[float, POSITIVE] = 1.0


@settings
class EnduranceSettings:
    """What is played.

    Attributes:
        warm_up_s: how long full load is measured.
    """

    phases: tuple[EndurancePhase, ...]
    warm_up_s: Annotated[float, POSITIVE]


@dataclass(slots=True)
class EndurancePlay:
    """One phase.

    Attributes:
        left: clients that have gone before their answer's end.
        late_s: how late the latest request was sent: more than little says that this side was too slow.
        footprints: at the begin, after each minute, and at the end.
    """

    phase: EndurancePhase
    served: Application
    rate_per_s: float
    ended: list[Ended] = field(default_factory=list)
    left: int = 0
    late_s: float = 0.0
    footprints: list[Footprint] = field(default_factory=list)
    lasted_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Send everything, and wait for every end."""
        self.footprints.append(await asyncio.to_thread(read_footprint, self.served.pid))
        async with httpx.AsyncClient(base_url=self.served.url, timeout=_TIMEOUT_S, limits=_NO_LIMIT) as http:
            leaving = asyncio.create_task(self._leave_again_and_again(http))
            watching = asyncio.create_task(self._watch())
            sent: set[asyncio.Task[None]] = set()
            number = 0
            while not leaving.done() or time.monotonic() < self.began + self.phase.seconds:
                await asyncio.sleep(max(0.0, self.began + number / self.rate_per_s - time.monotonic()))
                _begin(sent, self._one(http, number))
                number += 1
            await leaving
            await asyncio.gather(*sent)
            watching.cancel()
        self.lasted_s = time.monotonic() - self.began
        await asyncio.sleep(_SETTLE_S)
        self.footprints.append(await asyncio.to_thread(read_footprint, self.served.pid))

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        name, started_s = f"{self.phase.name}-{number}", time.monotonic()
        self.late_s = max(self.late_s, started_s - self.began - number / self.rate_per_s)
        waits = {"x-queue-timeout-s": f"{_QUEUE_TIMEOUT_S:g}"}
        # Neighbours differ in length, so that a swapped answer shows.
        end, detail = await asked(http, name, _tokens(number) * self.phase.longer, headers=waits)
        self.ended.append(Ended(name, end, started_s, time.monotonic(), detail))

    async def _leave_again_and_again(self, http: httpx.AsyncClient) -> None:
        chance = random.Random(self.phase.name)  # noqa: S311 - when to leave
        leaving: set[asyncio.Task[None]] = set()
        number = 0
        while self.left < self.phase.disconnects:
            if self.left + len(leaving) < self.phase.disconnects:
                _begin(leaving, self._leave(http, number, chance.uniform(0.0, _LEAVES_WITHIN_S)))
                number += 1
            await asyncio.sleep(1 / self.phase.disconnects_per_s)

    async def _leave(self, http: httpx.AsyncClient, number: int, after_s: float) -> None:
        """Ask, and be gone after so long: before the answer, in the middle of it, or not if it was quick."""
        try:
            async with asyncio.timeout(after_s):
                body = body_of(f"left-{number}", 400)
                async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    async for _ in response.aiter_raw():
                        pass
        except TimeoutError:
            self.left += 1
        except httpx.TransportError:
            # Counted as if it had been answered: it has not left.
            return

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            self.footprints.append(await asyncio.to_thread(read_footprint, self.served.pid))


def play(settings: EnduranceSettings, context: Context) -> Iterator[Measurement]:
    """All phases with one application."""
    phases = [phase for phase in settings.phases if not context.has({"phase": phase.name})]
    if not phases:
        return
    with served_application(_config()) as served:
        for phase in phases:
            capacity_per_s = uvloop.run(full_load(served, settings.warm_up_s, phase.longer))
            played = EndurancePlay(phase, served, phase.load * capacity_per_s)
            uvloop.run(played.run())
            yield Measurement(
                key={"phase": phase.name},
                figures={"capacity_per_s": capacity_per_s, **figures_of(played)},
                seeds=(0,),
                traces=generated("steady traffic"),
            )


async def full_load(served: Application, seconds: float, longer: int) -> float:
    """Answers per second with more clients than places."""
    ends = time.monotonic() + seconds
    answered = 0

    async def client(number: int) -> None:
        nonlocal answered
        while time.monotonic() < ends:
            end, _ = await asked(http, f"full-{number}", _tokens(number) * longer)
            answered += end == "answered" and time.monotonic() < ends
            number += _WARM_UP_CLIENTS

    async with httpx.AsyncClient(base_url=served.url, timeout=_TIMEOUT_S, limits=_NO_LIMIT) as http:
        await asyncio.gather(*(client(number) for number in range(_WARM_UP_CLIENTS)))
    return answered / seconds


def figures_of(played: EndurancePlay) -> dict[str, Any]:
    """How requests ended, what is still held once all have, and how processes have grown."""
    details = Counter(f"{one.end}: {_general(one.detail)}" for one in played.ended if one.detail)
    (status,) = json.loads(played.served.fetched("/debug/status"))["models"]
    phase = played.phase.name
    return {
        "rate_per_s": played.rate_per_s,
        "seconds": played.lasted_s,
        "sent": len(played.ended),
        "ends": account(played.ended),
        "answered_twice": answered_twice(played.served.log_lines("gateway"), f"{phase}-"),
        "disconnects": played.left,
        "still_held": {
            "waiting": sum(status["waiting"].values()),
            "in_flight": sum(each["in_flight"] for each in status["replicas"].values()),
            "in_engines": sum(each["report"]["running"] for each in status["replicas"].values()),
        },
        "sent_per_s": len(played.ended) / played.lasted_s,
        "late_s": played.late_s,
        "slowest_s": {
            end: max(one.ended_s - one.started_s for one in played.ended if one.end == end)
            for end in {one.end for one in played.ended}
        },
        "details": dict(details.most_common(10)),
        "processes": growth(played.footprints),
    }


def _tokens(number: int) -> int:
    return 20 + number % 180


def _begin(tasks: set[asyncio.Task[None]], work: Any) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _general(detail: str) -> str:
    """A reason without its numbers, so that equal ones are counted together."""
    return "".join("#" if letter.isdigit() else letter for letter in detail)


def _config() -> dict[str, Any]:
    def pool(name: str, longest: int, replicas: int) -> dict[str, Any]:
        emulated = {"profile": "laptop", "max_model_len": longest, "max_num_seqs": 1}
        return {
            "name": name,
            "engine": {"emulated": emulated},
            "replicas": replicas,
            "resources": {"num_cpus": 0.1},
        }

    models = [{"name": "demo", "pools": [pool("short", 2048, 2), pool("long", 8192, 1)]}]
    return serve_config("endurance", models, BUILD_APP, 0, {"replicas": 2, "num_cpus": 0.1})


EXPERIMENT = Experiment(settings=EnduranceSettings, play=play, only_by_name="it takes an hour: name it")
