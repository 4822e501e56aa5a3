"""An emulated engine alone, in a process of its own, behind the HTTP server of a pool replica."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvloop

from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.serving.pool.server import ReplicaServer, ReplicaServerSettings

_ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def started_engine(model: str, settings: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Serve an engine; yields its process id and its URL."""
    command = [sys.executable, "-m", "experiments.overhead.engine", model, json.dumps(dict(settings))]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, process.stdout.readline().strip()
        finally:
            process.terminate()


async def _serve(model: str, settings: Mapping[str, Any]) -> None:
    engine = EmulatedEngine(EmulatedEngineSettings(served_model_names=(model,), **settings))
    await engine.start()
    server = ReplicaServer(engine.app, "127.0.0.1", ReplicaServerSettings())
    await server.start()
    print(f"http://127.0.0.1:{server.port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], json.loads(sys.argv[2])))
