"""The scheduler's side of learning queues: lengths for the tuner, and the partition that it returns.

All of it is soft. Without a tuner the lengths overwrite each other, and the partition in force stays.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from serve_app.routing.replica import ReplicaSpec
from serve_app.scheduling import SchedulerSettings
from serve_app.scheduling.policies.partition import Partition
from serve_app.tuning.outcome_window import Row

_KEPT = 10_000
"""Lengths kept between two pulls: ten seconds at 1,000 requests/s; 80 kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a pull brings.

    Attributes:
        incarnation: of the scheduler that answers; another one knows nothing of what was sent before.
        lengths: of the prompts admitted since the last pull, in tokens, as the scheduler estimates them.
        at: now, on the scheduler's clock, which all times here are on.
        settled_until: when the oldest request arrived that is not over yet; `at`, when none is open.
        outcomes: of the requests that were concluded since the last pull, if they were asked for.
        replicas: those that are connected, if outcomes were asked for.
        settings: in force but for what is on trial, if outcomes were asked for.
        frozen: why nothing may be tried; empty when something may.
    """

    incarnation: int
    lengths: list[int]
    at: float = 0.0
    settled_until: float = 0.0
    outcomes: list[Row] = field(default_factory=list)
    replicas: list[ReplicaSpec] = field(default_factory=list)
    settings: SchedulerSettings | None = None
    frozen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionUpdate:
    """A partition to put in force, with what people want to know of it.

    Attributes:
        reason: first, interval, drift or adjusted (`tuning.strategic_loop.Reason`); restored when
            this scheduler did not know what was in force before.
        lengths: how many it was learned from.
        distance: from the partition before, see `tuning.strategic_loop.partition_distance`.
        age_s: time since it was learned.
    """

    partition: Partition
    reason: str
    lengths: int
    distance: float
    age_s: float


class LearnedQueues:
    """Lengths on their way to the tuner, and the latest partition from there.

    Attributes:
        update: the one in force; None while the policy has the queues that it began with.
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_KEPT)
        self.update: PartitionUpdate | None = None
        self._learned_at = 0.0

    def __len__(self) -> int:
        """Learned queues in force."""
        return len(self.update.partition) if self.update is not None else 0

    def on_arrival(self, prompt_tokens: int) -> None:
        """Keep a length for the next pull; with too many of them the oldest go."""
        self._lengths.append(prompt_tokens)

    def take(self) -> list[int]:
        """All kept lengths, the oldest first; they are kept no longer."""
        taken = list(self._lengths)
        self._lengths.clear()
        return taken

    def on_change(self, update: PartitionUpdate, now: float) -> None:
        """`update` is in force."""
        self.update, self._learned_at = update, now - update.age_s

    def age_s(self, now: float) -> float | None:
        """Time since the partition in force was learned; None without one."""
        return None if self.update is None else now - self._learned_at

    def described(self, now: float) -> dict[str, Any]:
        """How many are in force, how old they are, and why they were put in force."""
        update = self.update
        return {
            "learned": len(self),
            "age_s": self.age_s(now),
            "reason": update.reason if update is not None else None,
            "lengths": update.lengths if update is not None else None,
            "distance": update.distance if update is not None else None,
        }
