"""One gateway with so many waiting streams: what each takes of memory, and how soon one goes on.

The engine is told to answer one request, then another. From the moment of such an answer, whoever waits has
to be granted the place: the gateway tells the end, the scheduler grants, the gateway wakes a stream and
forwards it. The engine measures until that one has come. The way back, from the engine to the client, is
measured by the client, on the clock that both share.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.application import BUILD_APP, serve_config, served_application
from experiments.common.light_servers import role_beside_endpoints
from experiments.common.processes import process_tree
from experiments.gateways.held_engine import MODEL
from experiments.overhead.client import KEY
from experiments.overhead.footprint import pss_mb
from experiments.overhead.system import HOST, next_port
from serve_app.bench.connection import BenchError
from serve_app.metrics.statistics import Distribution

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 600.0
_SETTLE_S = 3.0
_A_DAY_S = 86_400.0


class Told:
    """A process that is told lines, and says one for each."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def tell(self, *words: object) -> Any:
        """What it says to a line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def waiting_figures(
    numbers: Sequence[int], opened_per_s: float, wakes: int, wake_every_s: float
) -> Iterator[tuple[int, dict[str, Any]]]:
    """For each of the numbers, which rise, with one application for all of them."""
    engine_port = next_port()
    with (
        _started("experiments.gateways.held_engine", engine_port) as engine_process,
        served_application(_application(engine_port), start_timeout_s=_START_TIMEOUT_S) as served,
        _started("experiments.gateways.waiting_client") as client_process,
    ):
        assert engine_process.stdout is not None
        engine_process.stdout.readline()
        engine, client = Told(engine_process), Told(client_process)
        port = int(served.url.rpartition(":")[2])
        before, open_before = _memory_mb(served.pid), 0
        for number in numbers:
            _open(client, port, number - open_before, opened_per_s)
            time.sleep(_SETTLE_S)
            memory = _memory_mb(served.pid)
            client.tell("told")
            turn_ms, cpu_before, began = [], _cpu_s(served.pid), time.monotonic()
            for _ in range(wakes):
                turn_ms.append(1_000 * float(engine.tell("answer")))
                time.sleep(wake_every_s)
            lasted_s = time.monotonic() - began
            told = client.tell("told")
            yield (
                number,
                {
                    "first_ms": Distribution.of(told["first_ms"]).as_json(),
                    "turn_ms": Distribution.of(turn_ms).as_json(),
                    "grown_mb": {role: mb - before.get(role, 0.0) for role, mb in memory.items()},
                    "cores": {
                        role: (cpu_s - cpu_before.get(role, 0.0)) / lasted_s
                        for role, cpu_s in _cpu_s(served.pid).items()
                    },
                },
            )
            open_before = number
        client.tell("drop")


def _open(client: Told, port: int, number: int, per_s: float) -> None:
    told = client.tell("open", port, number, per_s)
    if told["refusals"]:
        raise BenchError(f"a stream was refused: {told['refusals'][0][:500]}")


def _application(engine_port: int) -> dict[str, Any]:
    model = {
        "name": MODEL,
        "pools": [{"name": "all", "engine": {"remote": {"endpoints": [f"http://{HOST}:{engine_port}"]}}}],
        "scheduler": {
            "max_waiting": 50_000,
            "queue_timeout_s": {"default": _A_DAY_S},
            # All are of one tenant.
            "admission": {"tenant_share": 1.0},
            # As many in the engine as it is to have, however fast they go.
            "backpressure": {"advanced": {"lag_factor": 0.0}},
        },
    }
    config = serve_config("waiting", [model], BUILD_APP, 0)
    config["applications"][0]["args"]["gateway"] = {"keys": [{"tenant": "bench", "key": KEY}]}
    return config


@contextlib.contextmanager
def _started(module: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def _by_role(root: int, value: Mapping[int, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for process in process_tree(root):
        role = role_beside_endpoints(process)
        found[role] = found.get(role, 0.0) + value.get(process.pid, 0.0)
    return found


def _memory_mb(root: int) -> dict[str, float]:
    return _by_role(root, {process.pid: pss_mb(process.pid) for process in process_tree(root)})


def _cpu_s(root: int) -> dict[str, float]:
    return _by_role(root, {process.pid: process.cpu_s for process in process_tree(root)})
