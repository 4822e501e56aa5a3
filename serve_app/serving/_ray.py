"""Private interfaces of Ray and Ray Serve; this project uses none outside this module.

Each entry states what breaks without it and what to use instead. Checked with Ray 2.60; docs/upgrading.md
lists the checks for another release, and tests/test_private_interfaces.py covers each entry.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray
from pydantic import PrivateAttr
from ray import serve
from ray.experimental import internal_kv
from ray.serve import Application, Deployment
from ray.serve._private.build_app import build_app
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import HTTPOptions as HttpOptions
from ray.serve.config import ProxyLocation
from ray.serve.schema import ServeDeploySchema

__all__ = ["SERVE_CONTROLLER_NAME", "SERVE_NAMESPACE", "TEMPORARY_FOLDER", "HttpOptions"]

# `SERVE_CONTROLLER_NAME`, `SERVE_NAMESPACE`: `serve` polls whether the controller's actor is alive, and
# connects to Serve's namespace. Instead: `serve.status()`, which costs 50 ms of CPU time on both sides.

TEMPORARY_FOLDER = "_temp_dir"
"""Option of `ray.init` for the folder of logs and sockets. Without it, two instances on a machine share Ray's
default folder, and `serve` cannot find an engine's log. Instead: the environment variable RAY_TMPDIR."""


class ServedAddress(NamedTuple):
    """Address of an application.

    Attributes:
        options: `http_options`: host, port, certificates, idle timeout.
        application: its name.
        route: its route prefix; `/` for all paths.
        has_proxy: a proxy of Ray Serve listens there.
        cluster: address of the cluster's control service.
    """

    options: HttpOptions
    application: str
    route: str
    has_proxy: bool
    cluster: str = ""


def served_address() -> ServedAddress:
    """Return the address of this replica's application; queries the controller, and blocks.

    Without `_get_global_client` and its details, a gateway does not know its port. Instead: pass
    `http_options` to `build_app` as an argument of the application.
    """
    application = serve.get_replica_context().app_name
    client = serve.context._get_global_client()  # noqa: SLF001
    assert client is not None, "a replica is connected to Serve"
    details = client.get_serve_details()
    route = details["applications"].get(application, {}).get("route_prefix") or "/"
    has_proxy = details.get("proxy_location") != ProxyLocation.Disabled
    options = client.http_config
    if (port := os.environ.get("RAY_SERVE_WORKER_PROXY_HTTP_PORT")) is not None:
        # Serve's variable for several nodes on one machine.
        options = options.model_copy(update={"port": int(port)})
    cluster = ray.get_runtime_context().gcs_address
    return ServedAddress(options, application, route, has_proxy, cluster)


def alive_nodes() -> int:
    """Return the number of nodes of the cluster; blocks. `ray.nodes` is public, but has no types."""
    return sum(bool(node["Alive"]) for node in ray.nodes())  # type: ignore[no-untyped-call]


def deploy_file(schema: ServeDeploySchema) -> None:
    """Deploy a whole configuration, as `serve deploy` does.

    Without it, `serve` cannot deploy files with several applications, or with keys that it does not define
    itself. Instead: the REST API of the dashboard, which `serve` does not start.
    """
    client = serve.context._get_global_client()  # noqa: SLF001
    assert client is not None, "Serve was started"
    client.deploy_apps(schema)


def declared_application(name: str) -> dict[str, Any] | None:
    """Return an application as the file of the last `serve deploy` declares it; None if there was none.

    Without it, `deploy` cannot restore an application that it replaces for the first time. Instead: the REST
    API of the dashboard.
    """
    client = serve.context._get_global_client()  # noqa: SLF001
    found = client.get_serve_details()["applications"].get(name, {}) if client is not None else {}
    config: Mapping[str, Any] | None = found.get("deployed_app_config")
    return None if config is None else {key: value for key, value in config.items() if value is not None}


def stop_ray_helpers(*, dashboard: bool) -> None:
    """End unused helper processes of a local Ray; `ray.init` has no options for them.

    The log monitor forwards workers' output to drivers, and these do not read it. The autoscaler has no nodes
    to add, and only the dashboard shows its status. Without this, an idle application uses more CPU time.
    """
    node = ray._private.worker._global_node  # noqa: SLF001
    assert node is not None, "Ray was started here"
    node.kill_log_monitor(check_alive=False)
    if not dashboard:
        node.kill_monitor(check_alive=False)
        node.kill_dashboard(check_alive=False)


NAMESPACE = "ewsjf-serve"


def make_key(key: str) -> bool:
    """Create a key in the store of Ray's control service (GCS); return False if it exists.

    It is Ray's only atomic operation without an actor. Without it, two schedulers of a model may claim the
    same incarnation number during a rolling update. Instead: a detached actor that issues the numbers.
    """
    return not internal_kv._internal_kv_put(key, b"claimed", overwrite=False, namespace=NAMESPACE)  # noqa: SLF001


def keys_with(prefix: str) -> list[str]:
    """Return all keys of that store with a prefix; see `make_key`."""
    return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=NAMESPACE)]  # noqa: SLF001


def write_record(key: str, value: bytes) -> None:
    """Write into that store, where a record lives as long as the cluster; see `make_key`."""
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)  # noqa: SLF001


def read_record(key: str) -> bytes | None:
    """Return a record of that store; None if there is none."""
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)  # noqa: SLF001
    return value


class OwnVersionConfig(DeploymentConfig):
    """Deployment options with a version that Serve does not overwrite.

    Serve writes the application's version into the options just before it sends them to its controller. If
    another release sends them differently, that version is used, and every change of a file replaces all
    processes, engines included. Instead: one application per deployment.
    """

    _own_version: str = PrivateAttr("")

    def to_proto(self) -> Any:
        """Return the message for the controller."""
        message = super().to_proto()  # type: ignore[no-untyped-call]
        message.version = self._own_version
        return message


def set_version(deployment: Deployment, version: str) -> None:
    """Set a deployment's own version; see `OwnVersionConfig`."""
    given = deployment._deployment_config  # noqa: SLF001
    values = {name: getattr(given, name) for name in type(given).model_fields}
    config = OwnVersionConfig.model_construct(_fields_set=given.model_fields_set, **values)
    config._own_version = version  # noqa: SLF001 - a field would reach Serve's schema
    deployment._deployment_config = config  # noqa: SLF001


def deployments_of(application: Application) -> dict[str, Deployment]:
    """Return the deployments of an application by name, as Serve builds them.

    Without it, `deploy` cannot tell what a change replaces. Instead: a list that `serve_app.app` returns.
    """
    return {found.name: found for found in build_app(application, name="any").deployments}


def own_version(deployment: Deployment) -> str:
    """Return the version that `set_version` has set."""
    config = deployment._deployment_config  # noqa: SLF001
    assert isinstance(config, OwnVersionConfig), "every deployment of this project has a version"
    return config._own_version  # noqa: SLF001
