"""Runtime of each process: garbage collection, threads, event loop and metrics.

- `tune_memory`: for processes that serve many requests: returns little memory, and collects cycles rarely.
- `DaemonThreads`: an executor of blocking calls that may hang, such as those to a network file system.
- `precise_clock`, `run_in_parts`: a precise clock, and long computations in parts on the event loop.
- `ProcessMetrics`: metrics of the process itself, and its versions.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor, Future
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar

import uvloop
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import serve_app

# Python collects cycles after this many net allocations. Its default of 700 is reached by two requests, which
# hardly ever leave a cycle. Collections of older generations become rarer in the same way.
_YOUNG_OBJECTS, _OLDER_PER_YOUNG, _OLDEST_PER_OLDER = 20_000, 20, 20
# Parameters of glibc's `mallopt`, as its header numbers them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# glibc would return the memory of a long body to the system, and fault it in page by page for the next one.
_KEPT_BYTES = 64 * 1024 * 1024
# Maximum of glibc for this parameter.
_LONGEST_KEPT_BYTES = 32 * 1024 * 1024


def tune_memory() -> None:
    """Tune this process; call this once, after all modules have been imported.

    The process may retain 64 MiB more than it needs. On systems without glibc only Python is tuned.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _OLDER_PER_YOUNG, _OLDEST_PER_OLDER)
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LONGEST_KEPT_BYTES)


P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Executor with daemon threads, so that a call that never returns does not block the exit of the process.

    Python joins the threads of a `ThreadPoolExecutor` at exit, also those of `asyncio.to_thread`. Threads are
    started when calls need them.

    Args:
        most: maximum number of threads.
        name: name of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = 0

    def __repr__(self) -> str:
        return f"<DaemonThreads {self._name} threads={self._threads}>"

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in one of the threads, in the order of submission."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(call)
        if not self._idle.acquire(blocking=False) and self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT
        """End each thread after its calls, without waiting."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                self._idle.release()
                call = self._calls.get()
            if call is None:
                return
            call()


Found = TypeVar("Found")


def precise_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the clock of a loop's timers, in seconds, with full precision also for uvloop.

    uvloop's own clock has whole milliseconds; its timers follow the system's monotonic clock, like this one.
    """
    return time.monotonic if isinstance(loop, uvloop.Loop) else loop.time


async def run_in_parts(look: Generator[None, None, Found]) -> Found:
    """Run a computation that yields between its parts, and return its result."""
    while True:
        try:
            next(look)
        except StopIteration as end:
            found: Found = end.value
            return found
        await asyncio.sleep(0)


_STARTED_AT = time.time()
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessMetrics(Collector):
    """The process's own metrics; the labels identify the process."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names, self._values = tuple(labels), tuple(labels.values())

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; prometheus_client calls this for each page."""
        used = os.times()
        cpu = CounterMetricFamily(
            "ewsjf_process_cpu_seconds", "CPU time (user and system).", labels=self._names
        )
        cpu.add_metric(self._values, used.user + used.system)
        yield cpu
        text = "Resident memory; absent if the system does not report it."
        memory = GaugeMetricFamily("ewsjf_process_resident_memory_bytes", text, labels=self._names)
        if (held := _resident_bytes()) is not None:
            memory.add_metric(self._values, held)
        yield memory
        text = "Start time of the process, in seconds since 1970."
        started = GaugeMetricFamily("ewsjf_process_start_time_seconds", text, labels=self._names)
        started.add_metric(self._values, _STARTED_AT)
        yield started
        versions = build_info()
        names = (*self._names, *versions)
        text = "Always 1; the labels are the versions of the process."
        build = GaugeMetricFamily("ewsjf_build_info", text, labels=names)
        build.add_metric((*self._values, *versions.values()), 1)
        yield build


@cache
def build_info() -> Mapping[str, str]:
    """Return version and commit of this project, and the versions of Ray and vLLM; empty if unknown."""
    return {
        "version": serve_app.__version__,
        "commit": _commit(),
        "ray": _version("ray"),
        "vllm": _version("vllm"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit of the running checkout, or of the one from which the package was installed."""
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        command = ("git", "-C", str(root), "rev-parse", "HEAD")
        try:
            # The arguments are constants, and git is the user's.
            done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=5)  # noqa: S603
            return done.stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""
    try:
        origin = distribution("ewsjf-serve").read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    # PEP 610: packages that are not installed from a repository have no `vcs_info`.
    commit: str = json.loads(origin).get("vcs_info", {}).get("commit_id", "") if origin else ""
    return commit


def _resident_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * _PAGE_BYTES
