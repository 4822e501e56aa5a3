"""Where figures come from: the code's commit, the machine, the requests that were played."""

import hashlib
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_app.core.settings_base import settings
from serve_app.lab.provenance import commit, hardware, load_average
from serve_app.lab.workloads.catalog import WorkloadSettings, trace_file

# Rows and documents change no behaviour, so that several experiments can be played one after the other.
_NO_CODE = (":!experiments/*/results.jsonl", ":!*.md")


@settings
class TraceSource:
    """Where requests came from.

    Attributes:
        sha256: of the trace file; None says that lengths were generated.
    """

    name: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What figures were measured on.

    Attributes:
        load_average: runnable processes over the last 1, 5 and 15 minutes, our own among them.
    """

    processor: str
    cores: int
    memory_gib: float
    system: str
    python: str
    load_average: tuple[float, ...] = ()


def code_commit() -> str | None:
    """The commit, with `+changes` when tracked code differs from it; None outside a checkout."""
    return commit(ignore=_NO_CODE)


def this_machine() -> Machine:
    """This one, as busy as it is now."""
    facts: dict[str, Any] = hardware()
    # The kernel's version alone: what a distribution appends to it tells a reader nothing.
    facts["system"] = f"{platform.system()} {platform.release().partition('-')[0]}"
    return Machine(**facts, load_average=tuple(load_average() or ()))


def now_utc() -> str:
    """The time, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def trace_sources(trace: str) -> tuple[TraceSource, ...]:
    """Where a workload comes from on this machine.

    Args:
        trace: a name of `lab.workloads.catalog` or a path; several joined by `+`.
    """
    return tuple(_source(name) for name in trace.split("+"))


def generated(name: str) -> tuple[TraceSource, ...]:
    """A workload that is always generated."""
    return (TraceSource(name=name),)


def _source(name: str) -> TraceSource:
    path = trace_file(WorkloadSettings(trace=name))
    if path is None:
        return TraceSource(name=name)
    # The name of a path: where it lies is nobody's business.
    return TraceSource(name=Path(name).name, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
