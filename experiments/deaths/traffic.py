"""Steady streamed requests while parts of an application die, and the account of both."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import httpx

from experiments.common.audit import Ended, account, answered_twice, asked
from serve_app.core.settings_base import POSITIVE, at_least, settings


class DeathSignal(StrEnum):
    """What a process gets: SIGKILL ends it, SIGSTOP halts it with its connections open."""

    KILL = "KILL"
    STOP = "STOP"


@settings
class DeathsCase:
    """Deaths of one kind.

    Attributes:
        kind: of process, one of `run.PROCESSES`, or of node, one of `nodes.KINDS`.
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
        headless_s: from the death of a head until another is started.
    """

    cases: tuple[DeathsCase, ...]
    rate_per_s: Annotated[float, POSITIVE]
    pause_s: Annotated[float, POSITIVE]
    longest_s: Annotated[float, POSITIVE]
    headless_s: Annotated[float, POSITIVE]


TIMEOUT_S = 60.0
NO_LIMIT = httpx.Limits(max_connections=None)
# Lines of a log come a little later than the answers that they are about.
LOG_DELAY_S = 2.0


@dataclass(slots=True)
class Traffic:
    """Requests at a steady rate, each of a length of its own.

    Attributes:
        label: begins the names of the requests.
        client: gives the one by which the next request goes.
    """

    label: str
    rate_per_s: float
    client: Callable[[], httpx.AsyncClient]
    ended: list[Ended] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    async def run_beside(self, deaths: Coroutine[Any, Any, None]) -> None:
        """Send requests until the deaths are over, and wait for what is open then."""
        killing = asyncio.create_task(deaths)
        sent: set[asyncio.Task[None]] = set()
        number = 0
        while not killing.done():
            await asyncio.sleep(max(0.0, self.began + number / self.rate_per_s - time.monotonic()))
            task = asyncio.create_task(self._one(number))
            sent.add(task)
            task.add_done_callback(sent.discard)
            number += 1
        await killing
        await asyncio.gather(*sent)

    async def _one(self, number: int) -> None:
        name, started_s = f"{self.label}-{number}", time.monotonic()
        # Neighbours differ in length, so that a swapped answer shows.
        end, detail = await asked(self.client(), name, 20 + number % 180)
        self.ended.append(Ended(name, end, started_s, time.monotonic(), detail))

    def figures(self, back_s: Sequence[float | None], log: Iterable[str]) -> dict[str, Any]:
        """How requests ended, what clients heard besides, and how soon what was killed was replaced.

        Args:
            back_s: from each death until the application was whole; None when it took too long.
            log: the lines of all gateways.
        """
        details = Counter(f"{one.end}: {one.detail}" for one in self.ended if one.detail)
        return {
            "deaths": len(back_s),
            "sent": len(self.ended),
            "ends": account(self.ended),
            "answered_twice": answered_twice(log, f"{self.label}-"),
            "back_s": list(back_s),
            "slowest_s": max(one.ended_s - one.started_s for one in self.ended),
            "details": dict(details.most_common(10)),
        }
