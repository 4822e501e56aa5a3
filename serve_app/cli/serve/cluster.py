"""Ray and Ray Serve for the host: start, deployment, progress, drain and stop."""

import contextlib
import importlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import ray
from ray import serve
from ray.serve import Application, RunTarget
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
    ServeDeploySchema,
)

from serve_app.cli.application import ConnectionFailedError, request
from serve_app.cli.serve.failures import (
    RayStartError,
    Stages,
    StartDeaths,
    engine_cause,
    is_process_death,
    reason_of,
)
from serve_app.cli.serve.processes import Draining, HostJob, HostMessage, Progress, Stop
from serve_app.errors import ServeAppError
from serve_app.serving._ray import (
    SERVE_CONTROLLER_NAME,
    SERVE_NAMESPACE,
    TEMPORARY_FOLDER,
    declared_application,
    deploy_file,
    read_record,
    stop_ray_helpers,
    write_record,
)
from serve_app.settings.application import find_application

# Application keys that this module handles. With others, Serve deploys the file itself in a separate process,
# which takes some seconds longer.
_HANDLED_KEYS = frozenset({"name", "route_prefix", "import_path", "args", "logging_config"})
GATEWAY = "gateway"
# Limit from healthy deployments to a gateway that knows a replica of every model.
_GATEWAY_TIMEOUT_S = 120.0
# Limit for discovery to find a first server of every model. Later ones do not delay the others.
_DISCOVERY_TIMEOUT_S = 10.0
# A controller that is being replaced does not answer for some seconds.
_ANSWER_TIMEOUT_S = 10.0

_CALL_TIMEOUT_S = 10.0
# Gateways abort the remaining requests themselves at the deadline. The margin is for their response.
_DRAIN_MARGIN_S = 5.0
_DRAIN_POLL_S = 0.5


class Cluster:
    """One application on a Ray cluster, which is started here or was running before."""

    def __init__(self, job: HostJob, content: Mapping[str, Any]) -> None:
        self._job = job
        self._schema = ServeDeploySchema.model_validate(content)
        self._application = self._schema.applications[find_application(content)[0]]
        self.content: dict[str, Any] = self._schema.model_dump(mode="json", exclude_unset=True)
        self._began_at = time.monotonic()
        self._ready_at = time.monotonic()
        self._stages = Stages(Path(job.folder))
        self._deaths = StartDeaths()
        self.ray_address = ""
        self.dashboard: str | None = None

    def start(self) -> None:
        """Start Ray and Serve, or connect to a running cluster.

        Raises:
            RayStartError: Ray did not start on this machine.
            ServeAppError: there is no cluster at the address, or Serve did not start.
        """
        options: dict[str, Any] = {"namespace": SERVE_NAMESPACE, "log_to_driver": False}
        if self._job.address is not None:
            options["address"] = self._job.address
        else:
            options |= {
                "address": "local",
                TEMPORARY_FOLDER: str(Path(self._job.folder) / "ray"),
                "include_dashboard": self._job.dashboard,
            }
        try:
            context = ray.init(**options)
        except Exception as exc:  # Ray raises plain `Exception` if one of its processes is late
            error = RayStartError if self._job.address is None else ServeAppError
            raise error(f"Ray did not start: {exc}") from exc
        self.ray_address = ray.get_runtime_context().gcs_address
        if self._job.address is None:
            stop_ray_helpers(dashboard=self._job.dashboard)
        if self._job.dashboard and context.dashboard_url:
            self.dashboard = f"http://{context.dashboard_url}"
        http_options = self._schema.http_options.model_dump()
        if self._job.port is not None:
            http_options["port"] = self._job.port
        try:
            serve.start(
                proxy_location=self._schema.proxy_location,
                http_options=http_options,
                grpc_options=self._schema.grpc_options.model_dump(),
            )
        except Exception as exc:  # Serve raises various errors if a proxy does not start
            raise ServeAppError(f"Ray Serve did not start: {_last_line(exc)}") from exc

    def connect_to(self, address: str) -> None:
        """Connect to the cluster that runs the application.

        Raises:
            ServeAppError: there is no such cluster, or it does not run the application.
        """
        applications, name = connect(address), self._application.name
        if name not in applications:
            found = ", ".join(applications) or "none"
            raise ServeAppError(
                f"no application {name!r} runs at {address} (running: {found}): `name` of a configuration "
                "cannot change while it runs"
            )

    def deployed(self) -> dict[str, Any] | None:
        """Return the configuration that is deployed; None if nothing has recorded it."""
        declared = declared_application(self._application.name)
        if declared is not None:
            return {"applications": [declared]}
        record = read_record(self._record_key)
        return None if record is None else msgspec.json.decode(record)

    def record(self) -> None:
        """Record that this configuration is deployed."""
        write_record(self._record_key, msgspec.json.encode(self.content))

    @property
    def _record_key(self) -> str:
        return f"deployed/{self._application.name}"

    def deploy(self, application: Application) -> None:
        """Submit the application to Serve. `progress` reports the result."""
        ours = self._application
        if self._schema.model_fields_set & {"logging_config"} and ours.logging_config is None:
            ours.logging_config = self._schema.logging_config
        if ours.model_fields_set <= _HANDLED_KEYS and len(self._schema.applications) == 1:
            target = RunTarget(
                target=application,
                name=ours.name,
                route_prefix=ours.route_prefix,
                logging_config=ours.logging_config,
            )
            serve.run_many(
                [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
            )
        else:
            deploy_file(self._schema)

    def progress(self) -> Progress:
        """Return the progress of each deployment.

        Raises:
            ServeAppError: a deployment cannot start; the message has the reason.
        """
        found = serve.status().applications.get(self._application.name)
        if found is None:
            return Progress([], ["waiting for Serve"])
        if found.status == ApplicationStatus.DEPLOY_FAILED:
            raise ServeAppError(self._reason(found))
        ready, lines = [], []
        for name, deployment in found.deployments.items():
            states = {str(state): count for state, count in deployment.replica_states.items()}
            running, there = states.get("RUNNING", 0), sum(states.values())
            self._check_deployment(name, deployment)
            if deployment.status == "HEALTHY":
                ready.append(name)
                continue
            state = next((each.lower() for each in states if each != "RUNNING"), "waiting for resources")
            kind = self._job.engines.get(name)
            if kind == "vllm":
                state = self._stages.of(name) or state
            elif kind == "remote" and "failed to start" in deployment.message:
                state = f"{state} ({reason_of(name, deployment.message, Path(self._job.folder))})"
            lines.append(f"{name} {running}/{there or 1} {state}")
        if not found.deployments:
            lines.append("building the application")
        elif not lines and found.status == ApplicationStatus.DEPLOYING:
            lines.append("waiting for Serve")
        self._check_gateway(ready=not lines)
        return Progress(ready, lines)

    def _check_deployment(self, name: str, deployment: DeploymentStatusOverview) -> None:
        """Raise the reason if a deployment cannot start."""
        self._deaths.record(name, unhealthy=deployment.status == "UNHEALTHY")
        message, folder = deployment.message, Path(self._job.folder)
        if why := self._deaths.failure(name):
            raise ServeAppError(f"{why}: {engine_cause(name, folder) or message.strip()}")
        if deployment.status == "HEALTHY" or "failed to start" not in message or is_process_death(message):
            return
        # An engine that fails to start will fail again; an external server may become available later.
        if self._job.engines.get(name) != "remote":
            raise ServeAppError(reason_of(name, message, folder))

    def _check_gateway(self, *, ready: bool) -> None:
        """Raise if all deployments have been healthy for long but no gateway answers."""
        now = time.monotonic()
        if not ready:
            self._ready_at = now
        if now - self._ready_at > _GATEWAY_TIMEOUT_S:
            raise ServeAppError(f"no gateway responds at {self._job.url}/ready")

    def models_without_server(self) -> list[str] | None:
        """Return the models of which discovery has found no server so far; None until a gateway is ready.

        The gateways of a cluster may not be reachable from here, so Serve's status must suffice.
        """
        if self._job.address is not None:
            return []
        # The address and the certificate are from the same configuration, and it may be self-signed.
        ready = f"{self._job.url}/ready"
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        try:
            answer = request(ready, timeout_s=2, tls=trusting)
        except ConnectionFailedError:
            return None
        if answer.status == 200:
            return []
        missing: list[str] = list((answer.document() or {}).get("models_without_replica", ()))
        is_late = time.monotonic() - self._ready_at > _DISCOVERY_TIMEOUT_S
        return missing if missing and is_late and not any(map(self._is_inside, missing)) else None

    def _is_inside(self, name: str) -> bool:
        """Return whether a name is that of a model, not an alias, with an engine in its replicas."""
        kinds = (kind for each, kind in self._job.engines.items() if each.endswith(f"-{name}"))
        return any(kind != "remote" for kind in kinds)

    def rejected_settings(self) -> list[str]:
        """Return why gateways reject the deployed settings; empty if all apply them."""
        gateways = serve.get_app_handle(self._application.name)
        reasons = gateways.broadcast("rejected_settings").results(timeout_s=_CALL_TIMEOUT_S)
        return sorted(set(filter(None, reasons)))

    def is_controller_alive(self) -> bool:
        """Return whether Serve's controller responds."""
        try:
            # Cheaper than `serve.status()`, which takes 50 ms of CPU time here and again in the controller.
            controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            ray.get(controller.check_alive.remote(), timeout=_ANSWER_TIMEOUT_S)
        except Exception:  # noqa: BLE001 - Ray raises various errors if its processes are gone
            return False
        return True

    def drain(self, stop: Stop, on_progress: Callable[[HostMessage], None]) -> int:
        """Drain the gateways: they reject new requests and complete in-flight ones.

        Returns:
            The number of in-flight requests that were aborted with an error at the deadline.
        """
        name = self._application.name
        aborted = 0
        try:
            aborted = _drain_gateways(self._gateway, stop, on_progress)
        except Exception as exc:  # noqa: BLE001 - dead gateways have no in-flight requests
            print(f"drain: {exc!r}", flush=True)  # noqa: T201 - into the host's log
        for deployment in serve.status().applications[name].deployments:
            if deployment.startswith("scheduler-"):
                self._save(deployment)
        return aborted

    def stop(self) -> None:
        """Stop the application, and Ray if it was started here."""
        with contextlib.suppress(Exception):
            if self._job.address is not None:
                serve.delete(self._application.name)
            ray.shutdown()

    def connect(self) -> None:
        """Connect to the gateways, so that a stop takes effect immediately."""
        self._gateway = serve.get_app_handle(self._application.name)
        self._gateway.broadcast("open_requests").results(timeout_s=_CALL_TIMEOUT_S)

    def _save(self, deployment: str) -> None:
        """Persist a scheduler's learned state a last time. Tuners save after each step."""
        try:
            handle = serve.get_deployment_handle(deployment, self._application.name)
            handle.save.remote().result(timeout_s=_CALL_TIMEOUT_S)
        except Exception as exc:  # noqa: BLE001 - the shutdown must continue
            print(f"save of {deployment}: {exc!r}", flush=True)  # noqa: T201 - into the host's log

    def _reason(self, found: Any) -> str:
        folder = Path(self._job.folder)
        for name, deployment in found.deployments.items():
            if deployment.status in {"DEPLOY_FAILED", "UNHEALTHY"}:
                return reason_of(name, deployment.message, folder)
        return reason_of(self._application.name, found.message, folder)


def build(content: Mapping[str, Any]) -> Application:
    """Build the application of a configuration from its import path."""
    _, ours = find_application(content)
    module, _, name = ours["import_path"].partition(":")
    application: Application = getattr(importlib.import_module(module), name)(ours.get("args", {}))
    return application


def drain_cluster(address: str, stop: Stop, on_progress: Callable[[HostMessage], None]) -> int:
    """Drain the gateways of all applications of this project on a cluster.

    Returns:
        The number of in-flight requests that were aborted.

    Raises:
        ServeAppError: there is no such cluster, or no such application on it.
    """
    applications = connect(address)
    ours = [name for name, found in applications.items() if GATEWAY in found.deployments]
    if not ours:
        raise ServeAppError(f"the Ray cluster at {address} runs no application of this project")
    gateways = [serve.get_deployment_handle(GATEWAY, name) for name in ours]
    return sum(_drain_gateways(gateway, stop, on_progress) for gateway in gateways)


def _drain_gateways(
    gateway: "DeploymentHandle[Any]", stop: Stop, on_progress: Callable[[HostMessage], None]
) -> int:
    """Drain every gateway and report the progress to `on_progress`.

    Returns:
        The number of in-flight requests that were aborted with an error at the deadline.
    """
    deadline = time.monotonic() + stop.drain_s
    # A broadcast is sent only when its results are requested, so the drain itself must not be awaited here.
    gateway.broadcast("begin_drain", stop.drain_s, stop.retry_after_s).results(timeout_s=_CALL_TIMEOUT_S)
    while True:
        remaining_s = max(0.0, deadline - time.monotonic())
        counts = gateway.broadcast("open_requests").results(timeout_s=_CALL_TIMEOUT_S)
        on_progress(Draining(sum(counts), remaining_s))
        if not sum(counts) or not remaining_s:
            break
        time.sleep(min(_DRAIN_POLL_S, remaining_s))
    return sum(gateway.broadcast("end_drain").results(timeout_s=_DRAIN_MARGIN_S))


def connect(address: str) -> dict[str, ApplicationStatusOverview]:
    """Connect to a running cluster, and return the applications of Serve by name.

    Raises:
        ServeAppError: there is no such cluster.
    """
    try:
        # Ray itself retries for minutes if nothing listens there.
        endpoint = urlsplit(address if "//" in address else f"//{address}")
        if endpoint.port is not None:
            socket.create_connection((endpoint.hostname or "", endpoint.port), _CALL_TIMEOUT_S).close()
        ray.init(address=address, namespace=SERVE_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, OSError, ValueError) as exc:
        raise ServeAppError(f"there is no Ray cluster at {address}: {exc}") from exc
    return serve.status().applications


def _last_line(error: Exception) -> str:
    return str(error).strip().rsplit("\n", 1)[-1]
