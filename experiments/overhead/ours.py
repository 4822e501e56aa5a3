"""The application with everything switched on, and what stands behind it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.common.application import BUILD_APP, Application, serve_config, served_application
from experiments.common.light_endpoint import MODEL
from experiments.common.light_servers import role_beside_endpoints
from experiments.common.processes import CpuMeter, role_of
from experiments.overhead.client import KEY
from experiments.overhead.system import BEHIND_HAPROXY, DIRECT, OURS, Endpoints, System
from serve_app.checking.serve_file import NO_FRONT_END

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


def _served(
    model: Mapping[str, Any], proxy_location: str = NO_FRONT_END
) -> contextlib.AbstractContextManager[Application]:
    return served_application(application(model, proxy_location), start_timeout_s=_START_TIMEOUT_S)
