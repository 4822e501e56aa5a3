"""CPU time of a process and its descendants, by the part that each plays. Read from Linux's /proc."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the name: state, ppid, ..., utime and stime as the 12th and 13th, start time.
_PARENT, _USER, _SYSTEM, _STARTED = 1, 11, 12, 19


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """One process.

    Attributes:
        name: of its program, 15 characters at most.
        title: its first argument, which programs may set to tell what they are (Ray's workers do).
        cpu_s: user and system time since its start; the kernel counts in hundredths.
        started: when it was started, in ticks since the boot; with `pid` it names a process for good.
    """

    pid: int
    parent: int
    name: str
    title: str
    cpu_s: float
    started: int


def process_tree(root: int) -> list[ProcessUse]:
    """The process `root` and all that descend from it, as far as they are alive."""
    everyone = {one.pid: one for one in _processes()}
    family = [root]
    for pid in family:
        family.extend(one.pid for one in everyone.values() if one.parent == pid)
    return [everyone[pid] for pid in family if pid in everyone]


def is_alive(process: ProcessUse) -> bool:
    """Whether this very process still runs, and not another that has got its number."""
    try:
        return _read(Path("/proc") / str(process.pid)).started == process.started
    except OSError:
        return False


def role_of(process: ProcessUse) -> str:
    """The part that a process of an application plays: `gateway`, `scheduler`, `tuner`, `engine`.

    `serve` is Serve's controller and proxy managers, and `ray` all the rest.
    """
    # Ray's workers carry their deployment in their title.
    if process.title.startswith("ray::ServeReplica"):
        deployment = process.title.rpartition(":")[2]
        known = (role for role in ("gateway", "scheduler", "tuner") if deployment.startswith(role))
        return next(known, "engine")
    of_serve = process.title.startswith(("ray::Serve", "ray::ProxyActor"))
    return "serve" if of_serve else "ray"


@dataclass(slots=True)
class CpuMeter:
    """CPU time of several process trees by the role of each process, less what a role uses when idle.

    Args:
        roots: process ids.
        role_of: names the part that a process plays.
    """

    roots: Sequence[int]
    role_of: Callable[[ProcessUse], str]
    idle_per_s: dict[str, float] = field(default_factory=dict)

    def calibrate(self, seconds: float) -> None:
        """Measure for so long what the roles use while nothing is asked of them; it blocks."""
        calibrate((self,), seconds)

    def read(self) -> dict[str, float]:
        """CPU seconds used so far, by role."""
        used: dict[str, float] = defaultdict(float)
        for root in self.roots:
            for process in process_tree(root):
                used[self.role_of(process)] += process.cpu_s
        return dict(used)

    def used_since(self, before: Mapping[str, float], seconds: float) -> dict[str, float]:
        """What the work since `before` took, by role; it lasted `seconds`."""
        return {
            role: used - before.get(role, 0.0) - self.idle_per_s.get(role, 0.0) * seconds
            for role, used in self.read().items()
        }


def calibrate(meters: Sequence[CpuMeter], seconds: float) -> None:
    """`CpuMeter.calibrate` of several at the same time."""
    before = [meter.read() for meter in meters]
    time.sleep(seconds)
    for meter, began in zip(meters, before, strict=True):
        meter.idle_per_s = {
            role: (used - began.get(role, 0.0)) / seconds for role, used in meter.read().items()
        }


def _processes() -> list[ProcessUse]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found.append(_read(folder))
            except OSError:
                # It has ended meanwhile.
                continue
    return found


def _read(folder: Path) -> ProcessUse:
    # The name stands in parentheses and may contain some itself.
    before, _, after = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")
    fields = after.split()
    ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    title = (folder / "cmdline").read_bytes().partition(b"\0")[0].decode("utf-8", "replace")
    return ProcessUse(
        pid=int(folder.name),
        parent=int(fields[_PARENT]),
        name=before.partition("(")[2],
        title=title,
        cpu_s=ticks / _TICKS_PER_S,
        started=int(fields[_STARTED]),
    )
