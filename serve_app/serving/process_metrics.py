"""Metrics of the process itself, and its versions."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import serve_app

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
    return _Origin.of(origin).vcs_info.commit_id if origin else ""


class _Vcs(msgspec.Struct):
    commit_id: str = ""


class _Origin(msgspec.Struct):
    """Origin of an installed package (PEP 610)."""

    vcs_info: _Vcs = msgspec.field(default_factory=_Vcs)

    @classmethod
    def of(cls, text: str) -> "_Origin":
        return msgspec.json.decode(text, type=cls)


def _resident_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * _PAGE_BYTES
