"""Diagnosis of an application from outside: whether a gateway answers, and for which models it has replicas.

What a gateway and its schedulers know themselves is in `serve_app.serving.scheduler.findings`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serve_app.cli.command import program
from serve_app.cli.http_client import ConnectionFailedError, HttpResponse, request
from serve_app.cli.serve.failures import engine_cause
from serve_app.cli.serve.instance import Instance, instance_at
from serve_app.errors import ServeAppError
from serve_app.serving.scheduler.findings import Finding, Severity, lost_scheduler
from serve_app.settings.checking.machine import listening_process
from serve_app.settings.loading import load_settings

_LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}  # noqa: S104 - looked up, not bound


class NotServingError(ServeAppError):
    """No gateway of this project answers at the address. The message has the next step."""


def readiness_findings(url: str, running: Sequence[Instance]) -> list[Finding]:
    """Return the findings from `/ready`, the most severe first.

    Args:
        running: the applications of this machine.

    Raises:
        NotServingError: nothing, or something other than a gateway, answers there.
    """
    try:
        ready = request(f"{url}/ready")
    except ConnectionFailedError as error:
        raise NotServingError(_unreachable(url, str(error), running)) from error
    instance = instance_at(url, running)
    document = ready.document() or {}
    if "models_without_replica" not in document:
        raise NotServingError(_not_a_gateway(url, ready, instance))
    return list(_not_ready(document, instance))


def _unreachable(url: str, reason: str, running: Sequence[Instance]) -> str:
    what = f"nothing responds at {url}: {reason}"
    if instance := instance_at(url, running):
        return (
            f"{what}; the application of {instance.config} is starting or stopping there: wait; its terminal "
            f"shows the progress, and its logs are in {instance.folder}"
        )
    if listener := _listener(url):
        return (
            f"{what}, but its port is in use{listener}: if this is the application, it is starting or "
            "hanging, see its logs; otherwise stop it or pass --url"
        )
    if running:
        known = ", ".join(f"{each.url} ({each.config})" for each in running)
        return f"{what}: pass --url; applications run here at {known}"
    return f"{what}: start it with {program()} serve CONFIG, or pass --url"


def _not_a_gateway(url: str, ready: HttpResponse, instance: Instance | None) -> str:
    if instance is not None or ready.status in {502, 503, 504}:
        folder = f" in {instance.folder}" if instance is not None else ""
        return (
            f"a proxy responds at {url} with {ready.status}, but no gateway behind it responds: wait if it "
            f"was just started; otherwise see the logs{folder} and restart it"
        )
    return (
        f"the server at {url}{_listener(url)} is not a gateway of this project (/ready: {ready.status}): "
        "pass the application's own address as --url, including its route_prefix"
    )


def _listener(url: str) -> str:
    parts = urlsplit(url)
    if parts.hostname not in _LOCAL_HOSTS:
        return ""
    return listening_process(parts.port or (443 if parts.scheme == "https" else 80))


def _not_ready(document: Mapping[str, Any], instance: Instance | None) -> Iterator[Finding]:
    if document.get("status") == "stopping":
        yield Finding(
            Severity.DOWN,
            "the application is stopping: it rejects new requests and completes those in flight",
            "wait until it has stopped, then restart it",
        )
    for model in document["models_without_replica"]:
        if model in document.get("models_without_scheduler", ()):
            yield lost_scheduler(model)
            continue
        cause = _cause(model, instance) if instance is not None else ""
        where = f"the logs in {instance.folder}" if instance is not None else "the logs of its replicas"
        yield Finding(
            Severity.DOWN,
            f"model {model} has no replica, so its requests are rejected with 503"
            + (f"; first error of its engine: {cause}" if cause else ""),
            f"wait while an engine starts; if none becomes ready, see {where}",
        )


def _cause(model: str, instance: Instance) -> str:
    """Return the first error of a model's engine that runs on this machine."""
    try:
        models = load_settings(Path(instance.config)).models
    except ServeAppError:
        return ""  # the file was changed after the start
    deployments = (
        f"{pool.name}-{each.name}" for each in models if model in each.names for pool in each.pools
    )
    causes = (engine_cause(deployment, Path(instance.folder)) for deployment in deployments)
    return next(filter(None, causes), "")
