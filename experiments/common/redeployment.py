"""Redeployment of a served application through Ray Serve's controller, as `serve deploy` does it."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from experiments.common.application import Application
from experiments.common.errors import ExperimentError
from experiments.common.processes import titled
from serve_app.cli.serve.instance import read_instance
from serve_app.serving.access import ray_token

_TIMEOUT_S = 240.0
# In a separate process: this one may use several clusters in succession.
_DEPLOY = """
import json, sys, time
import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

config = json.load(sys.stdin)
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
try:
    client = serve.context._connect()
except RayServeException:
    serve.start(proxy_location=config["proxy_location"], http_options=config["http_options"])
    client = serve.context._connect()
client.deploy_apps(ServeDeploySchema.model_validate(config))
name, since = config["applications"][0]["name"], time.monotonic()
while time.monotonic() < since + float(sys.argv[2]):
    found = serve.status().applications[name]
    states = [state for each in found.deployments.values() for state in each.replica_states]
    if found.status == "DEPLOY_FAILED":
        sys.exit(f"{found.message}")
    if found.status == "RUNNING" and set(map(str, states)) <= {"RUNNING"}:
        sys.exit(0)
    time.sleep(0.2)
sys.exit(f"not complete: {found}")
"""


def changed_args(args: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with other values at these paths."""
    changed = copy.deepcopy(dict(args))
    for path, value in changes.items():
        *steps, last = path.split(".")
        place: Any = changed
        for step in steps:
            place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
        place[last] = value
    return changed


def redeploy(served: Application, config: Mapping[str, Any]) -> None:
    """Deploy a configuration; return once it is active and nothing is still stopping.

    Raises:
        ExperimentError: it does not run, cannot be deployed, or takes too long.
    """
    try:
        address = read_instance(served.folder).ray_address
    except OSError as exc:
        raise ExperimentError(f"{served.url} does not run: {exc}") from exc
    deploy(address, config, {"RAY_AUTH_MODE": "token", **ray_token(served.folder)})


def deploy(
    address: str, config: Mapping[str, Any], environment: Mapping[str, str], timeout_s: float = _TIMEOUT_S
) -> None:
    """Deploy a configuration on any cluster; Ray Serve starts if needed.

    Args:
        address: of Ray's control service.
        environment: authenticates this machine to Ray.

    Raises:
        ExperimentError: it cannot be deployed, or takes too long.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEPLOY, address, str(timeout_s)],
            input=json.dumps(config),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s + 60,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired as exc:
        raise ExperimentError(f"the application was not deployed within {exc.timeout:.0f} s") from exc
    if done.returncode:
        raise ExperimentError(f"the application was not deployed: {done.stderr.strip()[-2_000:]}")


def replica_processes(served: Application) -> dict[str, list[int]]:
    """Return the PIDs of an application's replicas, by deployment."""
    found: dict[str, list[int]] = {}
    for process, deployment in titled(served.pid, f"ray::ServeReplica:{served.name}:"):
        # While a method runs, its name follows that of the deployment.
        found.setdefault(deployment.split()[0].partition(".")[0], []).append(process.pid)
    return found
