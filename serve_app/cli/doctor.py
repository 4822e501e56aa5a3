"""Command `doctor`: diagnoses a running application and lists problems by severity.

`inspect` reads the application's endpoints once. Each check then evaluates that inspection only.
"""

import argparse
import email.utils
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from serve_app.cli.application import KEY_ADVICE, ApplicationClient, add_address
from serve_app.cli.command import Command, print_result, program
from serve_app.cli.http_client import ConnectionFailedError, HttpResponse, request
from serve_app.cli.serve.failures import engine_cause
from serve_app.cli.serve.instance import Instance, instance_at, running_instances
from serve_app.errors import ServeAppError, SettingsError
from serve_app.serving.scheduler.findings import Document, Finding, Severity, queue_findings, status_findings
from serve_app.settings.checking.machine import listening_process
from serve_app.settings.loading import load_settings

# -- inspection of a running application --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Responses of an application's endpoints, read once.

    Attributes:
        status: one document per model from `/debug/status`; empty if access is denied.
        queues: one document per model from `/debug/queue`; empty if access is denied.
        samples: samples of `/metrics`.
        clock_skew_s: seconds by which the application's clock is ahead of this machine's; None if unknown.
        rejection: response of a debug endpoint that could not be read; None if all were read.
    """

    health: HttpResponse
    ready: HttpResponse
    status: tuple[Document, ...] = ()
    queues: tuple[Document, ...] = ()
    samples: tuple[Sample, ...] = ()
    clock_skew_s: float | None = None
    rejection: HttpResponse | None = None

    def total(self, name: str, model: str, **labels: str) -> float:
        """Return the sum over a metric's samples with these labels."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and {"model": model, **labels}.items() <= sample.labels.items()
        )


def inspect(url: str, api_key: str | None) -> Inspection:
    """Read all endpoints once.

    Raises:
        ConnectionFailedError: the application does not respond.
    """
    health, ready = (request(f"{url}{path}") for path in ("/health", "/ready"))
    status, queue = (request(f"{url}{path}", api_key) for path in ("/debug/status", "/debug/queue"))
    rejection = next((response for response in (status, queue) if response.status != 200), None)
    return Inspection(
        health=health,
        ready=ready,
        status=_models(status),
        queues=_models(queue),
        samples=_samples(request(f"{url}/metrics", api_key)),
        clock_skew_s=_skew_s(health),
        rejection=rejection,
    )


def _models(response: HttpResponse) -> tuple[Document, ...]:
    document = response.document() if response.status == 200 else None
    models = (document or {}).get("models")
    return tuple(models) if isinstance(models, list) else ()


def _samples(response: HttpResponse) -> tuple[Sample, ...]:
    if response.status != 200:
        return ()
    try:
        families = list(text_string_to_metric_families(response.text))
    except ValueError:
        return ()
    return tuple(sample for family in families for sample in family.samples)


def _skew_s(response: HttpResponse) -> float | None:
    date = response.headers.get("date")
    try:
        return None if date is None else email.utils.parsedate_to_datetime(date).timestamp() - time.time()
    except ValueError:
        return None


# -- reachability ------------------------------------------------------------------------------------------


_LOCAL_HOSTS = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}  # noqa: S104 - looked up, not bound
# More than network delay explains. Above this, certificates, keys and logs of several machines disagree.
_MAX_SKEW_S = 30.0


def unreachable(url: str, reason: str, running: list[Instance]) -> Finding:
    """Return the finding for an address that does not respond."""
    what = f"nothing responds at {url}: {reason}"
    if instance := instance_at(url, running):
        return Finding(
            Severity.DOWN,
            f"{what}; the application of {instance.config} is starting or stopping there",
            f"wait; its terminal shows the progress, and its logs are in {instance.folder}",
        )
    if listener := _listener(url):
        return Finding(
            Severity.DOWN,
            f"{what}, but its port is in use{listener}",
            "if this is the application, it is starting or "
            "hanging: see its logs; otherwise stop it or pass --url",
        )
    if running:
        known = ", ".join(f"{each.url} ({each.config})" for each in running)
        return Finding(Severity.DOWN, what, f"pass --url; applications run here at {known}")
    return Finding(Severity.DOWN, what, f"start it with {program()} serve CONFIG, or pass --url")


def is_gateway(inspection: Inspection) -> bool:
    """Return whether a gateway of this project responded."""
    document = inspection.ready.document() or {}
    return "models_without_replica" in document


def not_a_gateway(url: str, inspection: Inspection, running: list[Instance]) -> Finding:
    """Return the finding for an address at which something other than a gateway responds."""
    instance = instance_at(url, running)
    if instance is not None or inspection.health.status in {502, 503, 504}:
        folder = f" in {instance.folder}" if instance is not None else ""
        return Finding(
            Severity.DOWN,
            f"a proxy responds at {url} with {inspection.health.status}, but no gateway behind it responds",
            f"wait if it was just started; otherwise see the logs{folder} and restart it",
        )
    return Finding(
        Severity.DOWN,
        f"the server at {url}{_listener(url)} is not a gateway of this project "
        f"(/ready: {inspection.ready.status})",
        "pass the application's own address as --url, including its route_prefix",
    )


def check_readiness(inspection: Inspection, instance: Instance | None) -> Iterator[Finding]:
    """Yield findings from `/ready`."""
    document = inspection.ready.document() or {}
    if document.get("status") == "stopping":
        yield Finding(
            Severity.DOWN,
            "the application is stopping: it rejects new requests and completes those in flight",
            "wait until it has stopped, then restart it",
        )
    for model in document.get("models_without_replica", ()):
        cause = _cause(model, instance) if instance is not None else ""
        where = (
            f"see the logs in {instance.folder}" if instance is not None else "see the logs of its replicas"
        )
        yield Finding(
            Severity.DOWN,
            f"model {model} has no replica, so its requests are rejected with 503"
            + (f"; first error of its engine: {cause}" if cause else ""),
            f"wait while an engine starts; if none becomes ready, {where}",
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


def check_access(inspection: Inspection) -> Iterator[Finding]:
    """Yield a finding if the debug endpoints could not be read."""
    response = inspection.rejection
    if response is None:
        return
    if response.status in {401, 403}:
        yield Finding(
            Severity.NOTE,
            f"queues and replicas are not accessible: the application returned {response.status}",
            f"pass an admin key with {KEY_ADVICE}",
        )
    else:
        yield Finding(
            Severity.DEGRADED,
            f"queues and replicas are not available: the application returned {response.status}",
            "see the logs of its gateways",
        )


def check_clock(inspection: Inspection) -> Iterator[Finding]:
    """Yield a finding if the application's clock differs from this machine's."""
    skew_s = inspection.clock_skew_s
    if skew_s is not None and abs(skew_s) > _MAX_SKEW_S:
        side = "ahead of" if skew_s > 0 else "behind"
        yield Finding(
            Severity.NOTE,
            f"its clock is {abs(skew_s):,.0f} s {side} this machine's, so times in logs differ",
            "synchronise both machines with a time server",
        )


def _listener(url: str) -> str:
    parts = urlsplit(url)
    if parts.hostname not in _LOCAL_HOSTS:
        return ""
    return listening_process(parts.port or (443 if parts.scheme == "https" else 80))


# -- failures since the schedulers started, from their counters ----------------------------------------------


_CONCLUDED = "ewsjf_requests_concluded_total"
# With fewer requests, a share is not meaningful.
_MIN_REQUESTS = 20
# (outcome, share of all requests above which it is reported, meaning, next step).
_OUTCOMES = (
    (
        "failed",
        0.01,
        "failed in an engine (502)",
        "the gateways' log has the engine's message (`outcome=failed`); then see the engine's log",
    ),
    (
        "expired",
        0.01,
        "exceeded their timeout in the queue (504)",
        "add replicas (`plan` computes how many), or raise queue_timeout_s",
    ),
    (
        "rejected_queue_full",
        0.01,
        "were rejected because the queue was full (429)",
        "add replicas (`plan` computes how many); clients should retry after Retry-After",
    ),
    (
        "rejected_no_replica",
        0.0,
        "were rejected because no replica was alive (503)",
        "see the engines' logs; with a second replica, the model survives the loss of one",
    ),
)
_PUT_BACK_SHARE = 0.01


def check_outcomes(inspection: Inspection, model: str) -> Iterator[Finding]:
    """Yield a finding per outcome of failed or rejected requests whose share is high."""
    total = inspection.total(_CONCLUDED, model)
    for outcome, share, meaning, step in _OUTCOMES:
        count = inspection.total(_CONCLUDED, model, outcome=outcome)
        if count > share * total and total >= _MIN_REQUESTS:
            yield Finding(
                Severity.RISK,
                f"model {model}: since its scheduler started, "
                f"{count:,.0f} of {total:,.0f} requests {meaning}",
                step,
            )


def check_put_backs(inspection: Inspection, model: str) -> Iterator[Finding]:
    """Yield a finding if many dispatches failed before their first byte and were put back."""
    sent = inspection.total("ewsjf_dispatches_total", model)
    name = "ewsjf_put_backs_total"
    back = inspection.total(name, model) - inspection.total(name, model, failure="revoked")
    if sent >= _MIN_REQUESTS and back > _PUT_BACK_SHARE * sent:
        yield Finding(
            Severity.RISK,
            f"model {model}: {back:,.0f} of {sent:,.0f} dispatches failed before the first byte and were "
            "put back",
            "see the label `failure` of ewsjf_put_backs_total, then the engine's log",
        )


def check_errors(inspection: Inspection, model: str) -> Iterator[Finding]:
    """Yield findings for errors of the scheduler, and of the store of its learned state."""
    if count := inspection.total("ewsjf_scheduler_errors_total", model):
        yield Finding(
            Severity.RISK,
            f"model {model}: its scheduler could not handle {count:,.0f} events",
            "see `event=core_failed` in its log, and report the traceback that follows",
        )
    for operation, action in (("save", "writing"), ("load", "reading"), ("restore", "restoring")):
        count = inspection.total("ewsjf_state_failures_total", model, operation=operation)
        if count:
            yield Finding(
                Severity.RISK,
                f"model {model}: {action} learned state failed {count:,.0f} times",
                "check that state_uri is reachable and writable from every node",
            )


# -- diagnosis ---------------------------------------------------------------------------------------------


def diagnose(url: str, api_key: str | None, running: list[Instance]) -> list[Finding]:
    """Return the findings for the application at an address, the most severe first.

    Args:
        api_key: a key with `admin`, if the application has keys.
    """
    try:
        inspection = inspect(url, api_key)
    except ConnectionFailedError as error:
        return [unreachable(url, str(error), running)]
    if not is_gateway(inspection):
        return [not_a_gateway(url, inspection, running)]
    instance = instance_at(url, running)
    return sorted(_findings(inspection, instance), key=lambda finding: finding.severity)


def _findings(inspection: Inspection, instance: Instance | None) -> Iterator[Finding]:
    yield from check_readiness(inspection, instance)
    yield from check_access(inspection)
    try:
        for model in inspection.status:
            yield from status_findings(model)
        for queue in inspection.queues:
            if "error" not in queue:
                yield from queue_findings(queue)
    except (KeyError, TypeError, AttributeError) as error:
        yield Finding(
            Severity.NOTE,
            f"the application's debug endpoints have an unexpected format ({error!r})",
            "run `doctor` of the application's release",
        )
    for name in _models_with_metrics(inspection):
        for check in (check_outcomes, check_put_backs, check_errors):
            yield from check(inspection, name)
    yield from check_clock(inspection)


def _models_with_metrics(inspection: Inspection) -> list[str]:
    """Return the models that have metrics; none if `/metrics` could not be read."""
    named = (sample.labels.get("model") for sample in inspection.samples)
    return sorted({name for name in named if name})


# -- command -----------------------------------------------------------------------------------------------


def _configure(parser: argparse.ArgumentParser) -> None:
    add_address(parser)


def _run(args: argparse.Namespace) -> int:
    client = ApplicationClient(args)
    url = client.url
    if not url.startswith(("http://", "https://")):
        raise SettingsError(f"--url must begin with http:// or https://, got {url!r}")
    findings = diagnose(url, client.api_key, list(running_instances()))
    if not findings:
        print_result(f"{url}: no problems found")
        return 0
    for number, finding in enumerate(findings, 1):
        step = finding.next_step.replace("ewsjf status", f"{program()} status")
        print_result(f"{number}. {finding.severity.label}: {finding.what}\n   next: {step}")
    return 1


COMMAND = Command(
    example="example:\n  ewsjf doctor --url http://127.0.0.1:8000",
    configure=_configure,
    run=_run,
)
