"""Provenance of a result: commit, settings, trace, seeds and machine, for every result file."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import serve_app

_ROOT = Path(__file__).resolve().parents[2]


def provenance(
    trace: Mapping[str, object], settings: Mapping[str, object], seeds: Sequence[int]
) -> dict[str, object]:
    """Return commit, settings, trace and seeds, with the machine and its current load."""
    return {
        "commit": commit(),
        "version": serve_app.__version__,
        "settings": dict(settings),
        "trace": dict(trace),
        "seeds": list(seeds),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "load_average": load_average(),
    }


def commit(ignore: Sequence[str] = ()) -> str | None:
    """Return the git commit, with `+changes` if tracked files differ from it; None outside a checkout.

    Args:
        ignore: git pathspecs of files whose changes do not count.
    """
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *ignore)
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changed else "")


def hardware() -> dict[str, object]:
    """Return processor, cores available to this process, memory and system."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def load_average() -> list[float] | None:
    """Return the mean runnable processes over 1, 5 and 15 minutes, which show other load on the machine."""
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except OSError:
        return None


def _git(*arguments: str) -> str:
    # The arguments are constants, and git is the user's.
    done = subprocess.run(  # noqa: S603 - see above
        ["git", "-C", str(_ROOT), *arguments],  # noqa: S607 - the user's git
        capture_output=True,
        check=True,
        text=True,
        timeout=10,
    )
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
