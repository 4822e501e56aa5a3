"""Origin of figures: commit, machine and requests."""

import hashlib
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_app.core.settings_base import settings
from serve_app.lab.provenance import commit, hardware, load_average
from serve_app.lab.workloads import trace_file

# Rows and documents change no behaviour, so several experiments can run in succession.
_NO_CODE = (":!experiments/*/results.jsonl", ":!*.md")


@settings
class TraceSource:
    """Origin of requests.

    Attributes:
        sha256: of the trace file; None for generated lengths.
    """

    name: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine of a measurement.

    Attributes:
        load_average: runnable processes over the last 1, 5 and 15 minutes, including the experiment's.
    """

    processor: str
    cores: int
    memory_gib: float
    system: str
    python: str
    load_average: tuple[float, ...] = ()


def code_commit() -> str | None:
    """Return the commit, with `+changes` if tracked code differs from it; None outside a checkout."""
    return commit(ignore=_NO_CODE)


def this_machine() -> Machine:
    """Return this machine with its current load."""
    facts: dict[str, Any] = hardware()
    # Only the kernel's version: a distribution's suffix means nothing to readers.
    facts["system"] = f"{platform.system()} {platform.release().partition('-')[0]}"
    return Machine(**facts, load_average=tuple(load_average() or ()))


def now_utc() -> str:
    """Return the time, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def trace_sources(trace: str) -> tuple[TraceSource, ...]:
    """Return the origin of a workload on this machine.

    Args:
        trace: a name or path, as in `lab.workloads.TraceChoice`; several joined by `+`.
    """
    return tuple(_source(name) for name in trace.split("+"))


def generated(name: str) -> tuple[TraceSource, ...]:
    """Return the origin of a workload that is always generated."""
    return (TraceSource(name=name),)


def _source(name: str) -> TraceSource:
    path = trace_file(name)
    return TraceSource(name=name) if path is None else file_source(path, Path(name).name)


def file_source(path: Path, name: str = "") -> TraceSource:
    """Return the origin of requests in a file, by default under the file's name; its folder is private."""
    return TraceSource(name=name or path.name, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
