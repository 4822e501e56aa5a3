"""What the tuner decides while traffic is played, as GET /debug/status tells it."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.common.application import Application


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the tuner's audit, but for when it was made."""

    what: str
    why: str
    figures: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class Watch:
    """Looks once a second.

    Attributes:
        began: when the load did, on the monotonic clock.
        decisions: each with its time since then, to a second or so, as the page ages them.
        last: what the page said of the tuner at the last look.
        errors: of the twin, each with the time at which the page first showed it.
    """

    served: Application
    began: float = 0.0
    decisions: dict[Decision, float] = field(default_factory=dict)
    last: Mapping[str, Any] = field(default_factory=dict)
    errors: list[Mapping[str, float]] = field(default_factory=list)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(1.0)

    def look(self) -> None:
        """Look once."""
        now_s = time.monotonic() - self.began
        self.last = json.loads(self.served.fetched("/debug/status"))["models"][0]["tuner"]
        error = (self.last.get("twin") or {}).get("error")
        if error and not (self.errors and error.items() <= self.errors[-1].items()):
            self.errors.append({**error, "at_s": now_s})
        for each in self.last.get("audit", ()):
            decision = Decision(each["what"], each["why"], each["figures"])
            self.decisions.setdefault(decision, now_s - min(each["age_s"], 1.0))

    def first_s(self, what: str) -> float | None:
        """When something of that kind was first decided."""
        return min((at for one, at in self.decisions.items() if one.what == what), default=None)
