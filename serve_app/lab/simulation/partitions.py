"""Sources of length queues in a run: a learner, a file, or the prior.

The learner itself is `serve_app.tuning.strategic_loop`; this module defines its interface for the simulation.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import TypeAdapter, ValidationError

from serve_app.core.policies.length_queues import LengthInterval, Partition
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError

LEARNED = "learned"
PRIOR = "prior"


class PartitionLearner(Protocol):
    """Observer of the prompts that arrive, which occasionally changes the queues."""

    def observe(self, prompt_tokens: int) -> None:
        """Record a prompt that arrived, by its length as the scheduler estimates it."""
        ...

    def due(self, now: float) -> Partition | None:
        """Return the partition to apply now, or None for no change."""
        ...


class PartitionSource(Protocol):
    """Factory of learners, one per run; a plain value that can be sent to processes and into results."""

    def learner(self, policy: str) -> PartitionLearner:
        """Return a new learner for a policy, without observations."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPartition:
    """One partition for the whole run."""

    partition: Partition

    def learner(self, policy: str = "") -> PartitionLearner:  # noqa: ARG002 - the same for all policies
        """Return a learner that returns the partition at its first call."""
        return _FixedLearner(self.partition)


@dataclass(slots=True)
class _FixedLearner:
    partition: Partition | None

    def observe(self, prompt_tokens: int) -> None:
        """Ignore all prompts."""

    def due(self, now: float) -> Partition | None:  # noqa: ARG002 - due at the first call
        """Return the partition once."""
        partition, self.partition = self.partition, None
        return partition


def partition_source(text: str, learned: PartitionSource) -> PartitionSource | None:
    """Return the source that `--partition` names: `learned`, `prior` (None) or a file.

    Raises:
        SettingsError: the file does not contain a partition.
    """
    if text == LEARNED:
        return learned
    return None if text == PRIOR else FixedPartition(read_partition(Path(text)))


@settings
class _IntervalRow:
    """An interval in a file."""

    min: int
    max: int
    mean: float
    count: int = field(default=1)


_ROWS = TypeAdapter(list[_IntervalRow])


def read_partition(path: Path) -> Partition:
    """Read a YAML list of `{min, max, mean, count}`, in tokens, the shortest lengths first.

    Raises:
        SettingsError: the file cannot be read, or its intervals are not a valid partition.
    """
    try:
        rows = _ROWS.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
        return Partition(
            tuple(
                LengthInterval(min_tokens=row.min, max_tokens=row.max, mean_tokens=row.mean, count=row.count)
                for row in rows
            )
        )
    except (OSError, yaml.YAMLError, ValidationError, ValueError) as error:
        raise SettingsError(
            f"{path} is not a partition: {error}; use {LEARNED}, {PRIOR} or a file with a list of "
            "{min, max, mean, count}"
        ) from error


def write_partition(path: Path, partition: Partition) -> None:
    """Write a partition to a file, in the format of `read_partition`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = partition_as_json(partition)
    path.write_text(yaml.safe_dump(rows, sort_keys=False, default_flow_style=None), encoding="utf-8")


def partition_as_json(partition: Partition) -> list[dict[str, Any]]:
    """Return the intervals in plain values, named as in a file."""
    return [
        {
            "min": queue.min_tokens,
            "max": queue.max_tokens,
            "mean": queue.mean_tokens,
            "count": queue.count,
        }
        for queue in partition.intervals
    ]
