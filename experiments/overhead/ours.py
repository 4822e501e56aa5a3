"""The application with everything switched on, and what stands behind it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from experiments.common.application import serve_config, served_application
from experiments.common.light_endpoint import MODEL
from experiments.common.processes import CpuMeter, role_of
from experiments.overhead.client import KEY
from experiments.overhead.system import DIRECT, OURS, Endpoints, System

# Others may keep the machine busy.
_START_TIMEOUT_S = 600.0


@contextlib.contextmanager
def started_direct(endpoints: Endpoints) -> Iterator[System]:
    """Nothing in between."""
    yield System(DIRECT, endpoints.urls[1], CpuMeter(()))


@contextlib.contextmanager
def started_ours(endpoints: Endpoints) -> Iterator[System]:
    """The application before two pools of one light engine each."""
    config = application(remote_model(endpoints))
    with served_application(config, start_timeout_s=_START_TIMEOUT_S) as served:
        yield System(OURS, served.url, CpuMeter((served.pid,), _role))


def application(model: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of `serve run` for a model: with keys, and all else is on by default."""
    gateway = {"keys": [{"tenant": "bench", "key": KEY}]}
    return serve_config("overhead", {"models": [model], "gateway": gateway})


def remote_model(endpoints: Endpoints) -> dict[str, Any]:
    """A short and a long pool of engines that run already."""
    pools = [
        {"name": name, "engine": {"remote": {"endpoints": [url]}}}
        for name, url in zip(("short", "long"), endpoints.urls, strict=True)
    ]
    return {"name": MODEL, "pools": pools}


def _role(process: psutil.Process) -> str:
    # The application has no engine: the replica of a pool reads the load of its endpoints.
    role = role_of(process)
    return "watcher" if role == "engine" else role
