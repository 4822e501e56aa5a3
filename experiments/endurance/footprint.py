"""Memory and descriptors of every process of an application, and how they change."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.common.processes import process_tree, role_of

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 2**20
# By then everything has been used once, and caches are full.
_SETTLED_S = 300.0


@dataclass(frozen=True, slots=True)
class ProcessSize:
    """One process.

    Attributes:
        descriptors: open ones.
    """

    role: str
    rss_mib: float
    descriptors: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Every process of an application at one moment, by its number and its start."""

    at_s: float
    sizes: dict[tuple[int, int], ProcessSize] = field(default_factory=dict)


def read_footprint(pid: int) -> Footprint:
    """Read it now, of this process and all that descend from it."""
    found = Footprint(time.monotonic())
    for process in process_tree(pid):
        folder = Path("/proc") / str(process.pid)
        try:
            resident = int((folder / "statm").read_text(encoding="utf-8").split()[1])
            descriptors = len(os.listdir(folder / "fd"))  # noqa: PTH208 - one call for many
        except OSError:
            # It has ended meanwhile.
            continue
        size = ProcessSize(role_of(process), resident * _PAGE_BYTES / _MIB, descriptors)
        found.sizes[process.pid, process.started] = size
    return found


def growth(footprints: Sequence[Footprint]) -> dict[str, Any]:
    """By role: how many processes, and memory and descriptors at the begin, after five minutes, at the end.

    Only processes that lived all the time are compared. `worst_mib` is the most that one of them grew from
    the fifth minute on, or from the begin when all was shorter.
    """
    first, last = footprints[0], footprints[-1]
    settled = next((each for each in footprints if each.at_s >= first.at_s + _SETTLED_S), first)
    lived = [key for key in first.sizes if key in settled.sizes and key in last.sizes]
    found = {}
    for role in sorted({first.sizes[key].role for key in lived}):
        keys = [key for key in lived if first.sizes[key].role == role]
        moments = (first, settled, last)
        found[role] = {
            "processes": len(keys),
            "rss_mib": [sum(each.sizes[key].rss_mib for key in keys) for each in moments],
            "descriptors": [sum(each.sizes[key].descriptors for key in keys) for each in moments],
            "worst_mib": max(last.sizes[key].rss_mib - settled.sizes[key].rss_mib for key in keys),
            "by_minute_mib": [
                sum(each.sizes[key].rss_mib for key in keys if key in each.sizes) for each in footprints
            ],
        }
    return found
