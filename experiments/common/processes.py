"""Programs and modules started here, and the CPU time of process trees by the role of each process."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from experiments.common.errors import ExperimentError

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 60.0
_SCHEDULED = 2
"""CPUCLOCK_SCHED: user and system time."""


def process_tree(root: int) -> list[psutil.Process]:
    """Return the process `root` and its descendants that are alive."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def titled(root: int, prefix: str) -> Iterator[tuple[psutil.Process, str]]:
    """Yield the processes below `root` whose title begins with `prefix`, each with the rest of its title."""
    for process in process_tree(root):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if title.startswith(prefix):
                yield process, title.removeprefix(prefix)


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the user and system time of these processes."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += _cpu_s(process)
    return total


def _cpu_s(process: psutil.Process) -> float:
    try:
        # Linux counts nanoseconds in the process's own clock (clock_getcpuclockid), and hundredths elsewhere.
        return time.clock_gettime(~process.pid << 3 | _SCHEDULED)
    except OSError:
        times = process.cpu_times()
        return float(times.user + times.system)


def role_of(process: psutil.Process) -> str:
    """Return the role of a process of an application: `gateway`, `scheduler`, `tuner`, `engine`.

    `serve` is Serve's controller and proxy managers, and `ray` all the rest.
    """
    try:
        title = next(iter(process.cmdline()), "")
    except psutil.NoSuchProcess:
        title = ""
    return role_of_title(title)


def role_of_title(title: str) -> str:
    """Return the role that the first argument of a process names: Ray's workers set theirs."""
    if title.startswith("ray::ServeReplica"):
        deployment = title.rpartition(":")[2]
        known = (role for role in ("gateway", "scheduler", "tuner") if deployment.startswith(role))
        return next(known, "engine")
    of_serve = title.startswith(("ray::Serve", "ray::ProxyActor"))
    return "serve" if of_serve else "ray"


@dataclass(slots=True)
class CpuMeter:
    """CPU time of several process trees by the role of each process, less what a role uses when idle.

    Args:
        roots: process ids.
    """

    roots: Sequence[int]
    role_of: Callable[[psutil.Process], str] = role_of
    idle_per_s: dict[str, float] = field(default_factory=dict)

    def read(self) -> dict[str, float]:
        """Return the CPU seconds used so far, by role."""
        used: dict[str, float] = defaultdict(float)
        for root in self.roots:
            for process in process_tree(root):
                used[self.role_of(process)] += cpu_s([process])
        return dict(used)

    def used_since(self, before: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Return the CPU seconds of the work since `before`, by role; it lasted `seconds`."""
        return {
            role: used - before.get(role, 0.0) - self.idle_per_s.get(role, 0.0) * seconds
            for role, used in self.read().items()
        }


def calibrate(meters: Sequence[CpuMeter], seconds: float) -> None:
    """Measure the idle CPU use of each role for `seconds`; blocks."""
    before = [meter.read() for meter in meters]
    time.sleep(seconds)
    for meter, began in zip(meters, before, strict=True):
        meter.idle_per_s = {
            role: (used - began.get(role, 0.0)) / seconds for role, used in meter.read().items()
        }


@contextlib.contextmanager
def started_program(command: Sequence[str], port: int) -> Iterator[int]:
    """Start a program that listens on a port of this machine; yield its PID once it does.

    Raises:
        ExperimentError: it ends before, or takes too long; the message has its last output.
    """
    with (
        tempfile.TemporaryFile() as console,
        subprocess.Popen(command, stdout=console, stderr=console, start_new_session=True) as process,
    ):
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    console.seek(0)
                    said = console.read().decode("utf-8", "replace")[-2_000:]
                    raise ExperimentError(f"{command[0]} does not listen: {said}")
                time.sleep(0.1)
            yield process.pid
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def started_module(name: str) -> Iterator["subprocess.Popen[str]"]:
    """Start a module that reads lines and answers each with one; it ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-m", name], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def answer_of(process: "subprocess.Popen[str]", line: str) -> str:
    """Send a line to a started module, and return its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline()
