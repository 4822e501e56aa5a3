"""What stands between client and engines, as it runs; and how a program is started until it listens."""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.common.light_servers import LightServers, started_light_servers
from experiments.common.processes import CpuMeter
from serve_app.bench.connection import BenchError
from serve_app.launch.environment import is_free

DIRECT, OURS, BEHIND_HAPROXY = "direct", "ours", "ours, HAProxy"
HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_SHORT_CONTEXT, _LONG_CONTEXT = 8_192, 4_000_000
# Above those of applications, below those that the kernel gives out, and others for another play.
_PORTS = iter(range(21_000 + os.getpid() % 1_000 * 10, 32_000))


@dataclass(frozen=True, slots=True)
class System:
    """One of them.

    Attributes:
        meter: of its processes; without any, nothing stands in between.
        version: as it states it.
    """

    name: str
    url: str
    meter: CpuMeter
    version: str = ""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the light engines are: the first has the short context, the second the long one."""

    ports: Sequence[int]

    @property
    def urls(self) -> list[str]:
        """One for each."""
        return [f"http://{HOST}:{port}" for port in self.ports]


@contextlib.contextmanager
def started_light_engines() -> Iterator[tuple[LightServers, Endpoints]]:
    """Two light engines in one process: of a short and of a long context."""
    with started_light_servers() as light:
        endpoints = Endpoints((next_port(), next_port()))
        for port, context_tokens in zip(endpoints.ports, (_SHORT_CONTEXT, _LONG_CONTEXT), strict=True):
            light.tell("open", port, context_tokens)
        yield light, endpoints


def next_port() -> int:
    """A port that nobody listens on, another one each time."""
    return next(port for port in _PORTS if is_free(port))


@contextlib.contextmanager
def started_program(command: Sequence[str], port: int) -> Iterator[int]:
    """A program that listens on a port; yields its process id once it does.

    Raises:
        BenchError: it ends before, or takes too long; the message has the last that it said.
    """
    with (
        tempfile.TemporaryFile() as console,
        subprocess.Popen(command, stdout=console, stderr=console) as process,
    ):
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    console.seek(0)
                    said = console.read().decode("utf-8", "replace")[-2_000:]
                    raise BenchError(f"{command[0]} does not listen: {said}")
                time.sleep(0.1)
            yield process.pid
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
