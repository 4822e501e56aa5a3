"""The settings, and the systems between client and engines: how each is started, and as it runs."""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from experiments.common.light_endpoint import LightServers, started_light_servers
from experiments.common.processes import CpuMeter
from serve_app.cli.serve.environment import is_free
from serve_app.core.settings_base import NOT_NEGATIVE, POSITIVE, at_least, settings
from serve_app.lab.bench.connection import BenchError


@settings
class RequestKind:
    """One kind of request.

    Attributes:
        body_bytes: of the prompt.
        chunks: of the stream that answers; 0 asks for a whole answer of one token.
        pace_ms: between two chunks.
        shared: prompts have all but their last words in common, so that prefix affinity finds them.
        clients: that send one request after the other, for each of these a row.
    """

    body_bytes: Annotated[int, at_least(10)] = 100
    chunks: Annotated[int, NOT_NEGATIVE] = 0
    pace_ms: Annotated[float, NOT_NEGATIVE] = 0.0
    shared: bool = False
    clients: tuple[Annotated[int, at_least(1)], ...] = (1, 16)

    @property
    def tokens(self) -> int:
        """That a request asks for: one in each chunk."""
        return max(1, self.chunks)


@settings
class QuickStartSettings:
    """What `configs/local.yaml` takes while nobody asks anything of it.

    Attributes:
        starts: of the application, one after the other.
        settle_s: after a start, before idle use is measured for `idle_s`.
    """

    starts: Annotated[int, NOT_NEGATIVE]
    settle_s: Annotated[float, NOT_NEGATIVE]
    idle_s: Annotated[float, POSITIVE]


@settings
class OverheadSettings:
    """All of it.

    Attributes:
        systems: before the light engines, in this order; what the machine lacks is left out with a word.
        kinds: names in `requests` that are played there.
        requests: every kind by its name.
        rounds: in each, all systems take turns, and another one is first.
        seconds: of each turn.
        idle_s: in each round, for how long the use of idle processes is measured.
        warm_up_s: for each system and kind, before anything is measured.
    """

    systems: tuple[str, ...]
    kinds: tuple[str, ...]
    requests: Mapping[str, RequestKind]
    rounds: Annotated[int, at_least(1)]
    seconds: Annotated[float, POSITIVE]
    idle_s: Annotated[float, POSITIVE]
    warm_up_s: Annotated[float, POSITIVE]
    quick_start: QuickStartSettings


DIRECT, OURS = "direct", "ours"
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
