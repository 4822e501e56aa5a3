"""Processes that die while an application starts.

Serve replaces a process that dies, as it does later, so one death is no failed start: the kernel kills for
memory, and a node is lost. An engine that dies whenever it has started is another thing.
"""

import re
from collections import Counter

# What Ray says of a process that ended by itself or was killed; an error of a constructor is told otherwise.
_DIED = re.compile(r"The actor died unexpectedly|its worker process has died")
# As many as Serve allows a constructor to fail.
_MOST_DEATHS = 3


class DeathsInStart:
    """Counts how often each deployment has become unhealthy."""

    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()
        self._unhealthy: set[str] = set()

    def __repr__(self) -> str:
        return f"<DeathsInStart {dict(self._deaths)}>"

    def note(self, deployment: str, *, unhealthy: bool) -> None:
        """Take what Serve says now."""
        if unhealthy and deployment not in self._unhealthy:
            self._deaths[deployment] += 1
            self._unhealthy.add(deployment)
        elif not unhealthy:
            self._unhealthy.discard(deployment)

    def are_too_many(self, deployment: str) -> str:
        """Why a start cannot succeed; empty while it can."""
        deaths = self._deaths[deployment]
        return f"{deployment} has died {deaths} times" if deaths > _MOST_DEATHS else ""


def is_death(message: str) -> bool:
    """Whether Serve's message of a failed start tells of a process that died, and not of its own error."""
    return _DIED.search(message) is not None
