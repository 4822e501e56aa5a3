"""A vLLM server: a process of its own on this machine, and what its engine counted."""

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

from experiments.common.processes import cpu_s, process_tree
from serve_app.lab.bench.connection import BenchError

_ROOT = Path(__file__).resolve().parents[1]
# Two servers that start side by side on two cores take about two minutes.
_START_TIMEOUT_S = 420.0
_END_TIMEOUT_S = 30.0

Option = str | int | float | bool
"""The value of one of vLLM's own options; a switch is on or off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServerSettings:
    """What a server is started with.

    Attributes:
        model: folder or hub name.
        served_model_names: clients may ask for any of them.
        options: vLLM's own, by name with underscores.
        environment: added to this process's own.
    """

    model: str
    served_model_names: tuple[str, ...]
    options: Mapping[str, Option]
    environment: Mapping[str, str]

    def command(self, port: int) -> list[str]:
        """What is run. Not `vllm serve`: vLLM's CPU build lacks what its console script needs."""
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port), "--model", self.model),
            *("--served-model-name", *self.served_model_names),
            *(word for name, value in self.options.items() for word in _words(name, value)),
        ]


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What an engine has done; the difference of two readings is what it did in between.

    Attributes:
        steps: iterations of its scheduler that computed something.
        step_tokens: prompt and output tokens computed in them.
        started: requests that left its own queue.
        queue_wait_s: how long those waited in it, summed.
        preemptions: requests thrown out of its batch.
    """

    steps: float
    step_tokens: float
    started: float
    queue_wait_s: float
    preemptions: float

    def since(self, before: "EngineCounters") -> "EngineCounters":
        """What was counted after `before`."""
        return EngineCounters(*(getattr(self, name) - getattr(before, name) for name in self.__slots__))


_NAMES = (
    "vllm:iteration_tokens_total_count",
    "vllm:iteration_tokens_total_sum",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_queue_time_seconds_sum",
    "vllm:num_preemptions_total",
)


def read_counters(metrics: str) -> EngineCounters:
    """The counters in the text of vLLM's `/metrics`, summed over its engine cores."""

    def total(name: str) -> float:
        samples = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})?\s+(\S+)", metrics, re.MULTILINE)
        return sum(map(float, samples))

    return EngineCounters(*map(total, _NAMES))


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A server that was started; several can start side by side.

    Attributes:
        log: where its output goes.
    """

    url: str
    log: Path
    process: "subprocess.Popen[bytes]"

    def wait_until_healthy(self) -> None:
        """Return as soon as it answers.

        Raises:
            BenchError: it ended, or does not answer within seven minutes.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise BenchError(f"vLLM ended with status {self.process.returncode}: read {self.log}")
            with contextlib.suppress(OSError):
                _get(f"{self.url}/health")
                return
            time.sleep(0.5)
        raise BenchError(f"vLLM did not answer within {_START_TIMEOUT_S:.0f} s: read {self.log}")

    def cpu_s(self) -> float:
        """CPU time that its processes have used until now, in seconds."""
        return cpu_s(process_tree(self.process.pid))

    def counters(self) -> EngineCounters:
        """What its engine has counted until now."""
        return read_counters(_get(f"{self.url}/metrics"))


@contextlib.contextmanager
def started_vllm(settings: VllmServerSettings, port: int, log: Path) -> Iterator[VllmServer]:
    """Start a server, which is ended afterwards; it answers only after a while.

    Args:
        port: a free one.
        log: where its output goes.
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
    """Ask the server to end, and kill what is left of it after a while."""
    family = process_tree(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_S)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
