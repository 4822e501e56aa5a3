"""vLLM server as a separate process on this machine, with its engine's counters."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from experiments.common.errors import ExperimentError
from experiments.common.processes import cpu_s, process_tree

_ROOT = Path(__file__).resolve().parents[1]
# Two servers that start in parallel on two cores take about two minutes.
_START_TIMEOUT_S = 420.0
_END_TIMEOUT_S = 30.0

Option = str | int | float | bool
"""Value of a vLLM option; a switch is on or off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServerSettings:
    """Start-up settings of a server.

    Attributes:
        model: folder or hub name.
        served_model_names: names that clients may use.
        options: vLLM's own, by name with underscores.
        environment: added to this process's own.
    """

    model: str
    served_model_names: tuple[str, ...]
    options: Mapping[str, Option]
    environment: Mapping[str, str]

    def command(self, port: int) -> list[str]:
        """Return the command line.

        `vllm serve` is not usable: the CPU build lacks what its console script needs.
        """
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port), "--model", self.model),
            *("--served-model-name", *self.served_model_names),
            *(word for name, value in self.options.items() for word in _words(name, value)),
        ]


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Counters of an engine; the difference of two readings covers the time between them.

    Attributes:
        steps: scheduler iterations that computed something.
        step_tokens: prompt and output tokens computed in them.
        started: requests that left the engine's queue.
        queue_wait_s: their summed wait in that queue.
        preemptions: requests removed from the batch.
    """

    steps: float
    step_tokens: float
    started: float
    queue_wait_s: float
    preemptions: float

    def since(self, before: "EngineCounters") -> "EngineCounters":
        """Return the difference to an earlier reading."""
        return EngineCounters(*(getattr(self, name) - getattr(before, name) for name in self.__slots__))


_NAMES = (
    "vllm:iteration_tokens_total_count",
    "vllm:iteration_tokens_total_sum",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_queue_time_seconds_sum",
    "vllm:num_preemptions_total",
)


def read_counters(metrics: str) -> EngineCounters:
    """Return the counters of a `/metrics` text, summed over engine cores."""

    return EngineCounters(*(counter_total(metrics, name) for name in _NAMES))


def counter_total(metrics: str, name: str) -> float:
    """Return one counter of a `/metrics` text, summed over engine cores."""
    samples = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})?\s+(\S+)", metrics, re.MULTILINE)
    return sum(map(float, samples))


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A started server; several can start in parallel.

    Attributes:
        log: file for its output.
    """

    url: str
    log: Path
    process: "subprocess.Popen[bytes]"

    def wait_until_healthy(self) -> None:
        """Return once it answers.

        Raises:
            ExperimentError: it ended, or does not answer within seven minutes.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ExperimentError(f"vLLM ended with status {self.process.returncode}: read {self.log}")
            with contextlib.suppress(OSError):
                _get(f"{self.url}/health")
                return
            time.sleep(0.5)
        raise ExperimentError(f"vLLM did not answer within {_START_TIMEOUT_S:.0f} s: read {self.log}")

    def cpu_s(self) -> float:
        """Return the CPU time of its processes so far, in seconds."""
        return cpu_s(process_tree(self.process.pid))

    def counters(self) -> EngineCounters:
        """Return its engine's counters so far."""
        return read_counters(_get(f"{self.url}/metrics"))


@contextlib.contextmanager
def started_vllm(settings: VllmServerSettings, port: int, log: Path) -> Iterator[VllmServer]:
    """Start a server and end it afterwards; it answers only after a while.

    Args:
        port: a free port.
        log: file for its output.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            settings.command(port),
            cwd=_ROOT,
            env={**os.environ, **settings.environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield VllmServer(f"http://127.0.0.1:{port}", log, process)
    finally:
        _end(process)


def _words(name: str, value: Option) -> Iterator[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{option}" if value else f"--no-{option}"
    else:
        yield from (f"--{option}", value if isinstance(value, str) else json.dumps(value))


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode("utf-8", "replace")
    return text


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Terminate the server, then kill what is left of it."""
    family = process_tree(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_S)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
