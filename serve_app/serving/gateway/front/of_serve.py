"""What Ray Serve was told of its HTTP front end."""

from typing import NamedTuple

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation


class FrontOfServe(NamedTuple):
    """Where an application takes requests.

    Attributes:
        options: the address, and what holds for connections.
        application: the name of this replica's application.
        route: its prefix, where no front end runs and the gateway is to listen itself; None where one runs.
        drain_s: how long after the order to stop Serve ends the process.
    """

    options: HTTPOptions
    application: str
    route: str | None
    drain_s: float


def front_of_serve() -> FrontOfServe:
    """Ask the controller, from a replica; it blocks."""
    context = serve.get_replica_context()
    application, drain_s = context.app_name, context._deployment_config.graceful_shutdown_timeout_s  # noqa: SLF001
    client = serve.context._get_global_client()  # noqa: SLF001 - Serve tells it nowhere else
    if client is None:
        return FrontOfServe(HTTPOptions(), application, None, drain_s)
    location = ray.get(client._controller.get_proxy_location.remote())  # noqa: SLF001
    if location != ProxyLocation.Disabled:
        return FrontOfServe(client.http_config, application, None, drain_s)
    details = client.get_serve_details()["applications"].get(application, {})
    return FrontOfServe(client.http_config, application, details.get("route_prefix") or "/", drain_s)
