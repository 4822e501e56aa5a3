"""The application with everything switched on, and what stands behind it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.common.application import BUILD_APP, Application, serve_config, served_application
from experiments.common.light_endpoint import MODEL
from experiments.common.light_servers import role_beside_endpoints
from experiments.common.processes import CpuMeter, ProcessUse, role_of
from experiments.overhead.client import KEY
from experiments.overhead.engine import started_engine
from experiments.overhead.system import BEHIND_HAPROXY, DIRECT, OURS, Endpoints, System
from serve_app.checking.serve_schema import NO_FRONT_END

ALONE = "engine alone"
REPLICA_MODEL = "instant"
# Others may keep the machine busy.
_START_TIMEOUT_S = 600.0


@contextlib.contextmanager
def started_direct(endpoints: Endpoints) -> Iterator[System]:
    """Nothing in between."""
    yield System(DIRECT, endpoints.urls[1], CpuMeter((), role_of))


@contextlib.contextmanager
def started_ours(endpoints: Endpoints, name: str = OURS) -> Iterator[System]:
    """The application before two pools of one light engine each.

    Args:
        name: says whether HAProxy stands in front of the gateway.
    """
    location = "HeadOnly" if name == BEHIND_HAPROXY else NO_FRONT_END
    with _served(remote_model(endpoints), location) as served:
        yield System(name, served.url, CpuMeter((served.pid,), role_beside_endpoints))


@contextlib.contextmanager
def started_ours_with_replicas(engine: Mapping[str, Any], advanced: Mapping[str, Any]) -> Iterator[System]:
    """The application with a pool of its own, of one emulated engine."""
    with _served(replica_model(engine, advanced)) as served:
        yield System(OURS, served.url, CpuMeter((served.pid,), role_of))


@contextlib.contextmanager
def started_engine_alone(engine: Mapping[str, Any], advanced: Mapping[str, Any]) -> Iterator[System]:
    """The same engine behind the same HTTP server, and nothing in between."""
    with started_engine(REPLICA_MODEL, {**engine, **advanced}) as (pid, url):
        yield System(DIRECT, url, CpuMeter((pid,), _alone))


def application(model: Mapping[str, Any], proxy_location: str = NO_FRONT_END) -> dict[str, Any]:
    """The configuration of `serve run` for a model: with keys, and all else is on by default."""
    config = serve_config("overhead", [model], BUILD_APP, 0, proxy_location=proxy_location)
    config["applications"][0]["args"]["gateway"] = {"keys": [{"tenant": "bench", "key": KEY}]}
    return config


def remote_model(endpoints: Endpoints) -> dict[str, Any]:
    """A short and a long pool of engines that run already."""
    pools = [
        {"name": name, "engine": {"remote": {"endpoints": [url]}}}
        for name, url in zip(("short", "long"), endpoints.urls, strict=True)
    ]
    return {"name": MODEL, "pools": pools}


def replica_model(engine: Mapping[str, Any], advanced: Mapping[str, Any]) -> dict[str, Any]:
    """One pool with an engine of our own."""
    emulated = {"emulated": {**engine, "advanced": dict(advanced)}}
    return {
        "name": REPLICA_MODEL,
        "pools": [{"name": "all", "engine": emulated, "resources": {"num_cpus": 0.1}}],
    }


def _served(
    model: Mapping[str, Any], proxy_location: str = NO_FRONT_END
) -> contextlib.AbstractContextManager[Application]:
    return served_application(application(model, proxy_location), start_timeout_s=_START_TIMEOUT_S)


def _alone(process: ProcessUse) -> str:  # noqa: ARG001 - the meter passes it
    return ALONE
