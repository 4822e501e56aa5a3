"""Command `status`: prints what is wrong with a running application, and its state as tables.

It finds from outside whether a gateway answers, and for which models it has replicas. What a gateway and its
schedulers know themselves is in `serve_app.serving.scheduler.findings`.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from serve_app.cli.application import (
    ApplicationClient,
    ConnectionFailedError,
    Document,
    HttpResponse,
    add_address,
    request,
)
from serve_app.cli.command import add_whole, print_result, program
from serve_app.cli.serve.failures import engine_cause
from serve_app.cli.serve.instance import Instance, instance_at, running_instances
from serve_app.errors import ServeAppError
from serve_app.lab.tables import documents_table, value_at
from serve_app.serving.scheduler.findings import (
    Finding,
    Severity,
    gateway_findings,
    lost_scheduler,
    queue_findings,
    status_findings,
)
from serve_app.settings.application import load_settings
from serve_app.settings.checking import listening_process

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


_MAX_COSTS = 10
_MAX_PROGRAMS = 15


EXAMPLE = "example:\n  ewsjf status --url http://127.0.0.1:8000"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_address(parser)
    add_whole(parser, "--sub-queues", "maximum number of sub-queues to show", 15)
    tuner = parser.add_mutually_exclusive_group()
    tuner.add_argument(
        "--freeze-tuner",
        action="store_true",
        help="stop all trials: roll back the current ones, keep adopted values, and start no others",
    )
    tuner.add_argument("--thaw-tuner", action="store_true", help="resume the tuners")
    parser.add_argument("--json", action="store_true", help="print the application's documents as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    client = ApplicationClient(args)
    if args.freeze_tuner or args.thaw_tuner:
        word = "freeze" if args.freeze_tuner else "thaw"
        models = client.models(f"/debug/tuner/{word}", method="POST")
        for model in models:
            print_result(f"{model['model']}: {model.get('error') or model.get('message', word)}")
        return 1 if any("error" in model for model in models) else 0
    findings = readiness_findings(client.url, list(running_instances()))
    if not args.json:
        _print(findings)
    page = client.document("/debug/status", "models")
    status, queue, costs = page["models"], client.models("/debug/queue"), client.models("/debug/costs")
    # `/ready` has named the schedulers that are not connected.
    connected = [model for model in status if lost_scheduler(model["model"]) not in findings]
    inside = [each for model in connected for each in status_findings(model)]
    inside += [each for model in queue if "error" not in model for each in queue_findings(model)]
    inside += gateway_findings(page)
    inside.sort(key=lambda each: each.severity)
    findings += inside
    if args.json:
        documents: dict[str, object] = {"findings": [each.as_json() for each in findings]}
        documents |= {"status": {"models": status}, "queue": {"models": queue}, "costs": {"models": costs}}
        print_result(json.dumps(documents, indent=1))
    else:
        _print(inside)
        if not findings:
            waiting = sum(model.get("waiting", 0) for model in queue)
            queued = f"; {waiting:,} requests are queued" if waiting else ""
            print_result(f"{client.url}: no problems found{queued}")
        for part in rendered(Pages(status, queue, costs), args.sub_queues):
            print_result(part)
    return 1 if any(each.severity is Severity.DOWN for each in findings) else 0


def _print(findings: Sequence[Finding]) -> None:
    for each in findings:
        step = each.next_step.replace("ewsjf status", f"{program()} status")
        print_result(f"{each.severity.label}: {each.what}\n  next: {step}")


class Pages(NamedTuple):
    """Documents of an application, each with one entry per model."""

    status: Sequence[Document]
    queues: Sequence[Document] = ()
    costs: Sequence[Document] = ()


def rendered(pages: Pages, most_shown: int) -> Iterator[str]:
    """Yield tables and lines, model by model."""
    of_model = {queue.get("model"): queue for queue in pages.queues}
    costs_of = {costs.get("model"): costs for costs in pages.costs}
    for model in pages.status:
        yield f"\n{model['model']}"
        if "error" in model:
            yield f"  {model['error']}"
            continue
        yield _overview(model)
        yield _replicas(model["replicas"])
        yield from _learned_contexts(model["replicas"])
        queue = of_model.get(model["model"], {})
        if queue.get("sub_queues"):
            yield _sub_queues(queue, most_shown)
        if queue.get("programs", {}).get("rows"):
            yield _programs(queue["programs"])
        served = {name: counters for name, counters in queue.get("served", {}).items() if counters}
        if served:
            yield _tenants(served)
        if (costs := costs_of.get(model["model"], {})).get("rows"):
            yield _costs(costs)
        if model.get("tuner"):
            yield from _tuner(model["tuner"])


def _overview(model: Document) -> str:
    waiting = ", ".join(f"{count} {name}" for name, count in model["waiting"].items() if count) or "none"
    queues = model["queues"]
    learned = "not learned yet"
    if queues["learned"]:
        learned = f"{queues['learned']} learned, {queues['age_s']:.0f} s ago"
    return (
        f"  waiting: {waiting}; length queues: {learned}; gateways: {model['gateways']}; "
        f"scheduler {model['incarnation']}"
    )


_REPLICAS = (
    "pool: {pool} | replica: {replica} | state: {state} | limit: {limit} | in flight: {in_flight} | "
    "running: {report.running} | engine queue: {report.waiting} | KV used: {report.kv_usage_ratio:.0%} | "
    "ms/token: {ms_per_token:.1f}"
)


def _replicas(replicas: Mapping[str, Document]) -> str:
    rows = []
    for name, replica in sorted(replicas.items(), key=lambda item: (item[1]["pool"], item[0])):
        tpot_s = value_at(replica, "report.tpot_s")
        added = {"replica": name, "ms_per_token": None if tpot_s is None else 1e3 * tpot_s}
        rows.append({**replica, **added, "limit": replica.get("limit") or None})
    return _titled("replicas", _REPLICAS, rows, text_columns=4)


def _learned_contexts(replicas: Mapping[str, Document]) -> Iterator[str]:
    """Yield context limits learned from rejections, for replicas that do not report one."""
    for name, replica in sorted(replicas.items()):
        if learned := replica.get("learned_context_tokens"):
            yield f"  {name} reports no context limit; learned from rejected requests: {learned:,} tokens"


_SUB_QUEUES = (
    "class: {priority} | tenant: {tenant} | length queue: {length_queue} | why: {reason} | "
    "waiting: {waiting} | head queue time: {wait_s:.1f} s | score: {score:.3g}"
)


def _sub_queues(queue: Document, most: int) -> str:
    omitted = max(0, len(queue["sub_queues"]) - most) + queue["sub_queues_omitted"]
    title = f"sub-queues, by queue time of the head; policy {queue['policy']}"
    title += f"; {omitted} more" if omitted else ""
    return _titled(title, _SUB_QUEUES, queue["sub_queues"][:most], text_columns=4)


_PROGRAMS = (
    "tenant: {tenant} | program: {program:.40} | state: {state} | "
    "resident on: {resident_on} | conversations: {conversations} | turns: {turns} | "
    "context tokens: {context_tokens:,} | tokens saved: {saved_tokens:,} | queue: {queued_s:.0f} s | "
    "thereof for KV cache: {waiting_s:.0f} s | engine: {engine_s:.0f} s | gaps: {gap_s:.0f} s"
)


def _programs(programs: Document) -> str:
    states = ", ".join(f"{count} {state}" for state, count in sorted(programs["recent_by_state"].items()))
    shown = programs["rows"][:_MAX_PROGRAMS]
    rows = [{**row, "resident_on": ", ".join(row["replicas"]) or None} for row in shown]
    return _titled(f"programs: {states}", _PROGRAMS, rows, text_columns=4)


def _tenants(served: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        {"class": name, "tenant": tenant, "service": counter}
        for name, counters in served.items()
        for tenant, counter in sorted(counters.items(), key=lambda item: -item[1])
    ]
    columns = "class: {class} | tenant: {tenant} | service: {service:,.0f}"
    return _titled("service of tenants, divided by weight", columns, rows, text_columns=2)


_COSTS = (
    "tenant: {tenant} | class: {class} | pool: {pool} | engine time: {engine_seconds:,.1f} s | "
    "share: {share:.0%} | delay imposed on others: {imposed_delay_seconds:,.1f} s"
)


def _costs(costs: Document) -> str:
    rows = costs["rows"]
    more = f"; {len(rows) - _MAX_COSTS} more in /debug/costs" if len(rows) > _MAX_COSTS else ""
    # A scheduler of an older release does not report this.
    began = costs.get("since")
    since = "" if began is None else f", since {datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M} UTC"
    return _titled(f"cost by tenant{since}{more}", _COSTS, rows[:_MAX_COSTS], text_columns=3)


def _tuner(tuner: Document) -> Iterator[str]:
    yield f"  tuner: {tuner['mode']}, {tuner['state']}"
    if tuner.get("twin"):
        yield f"  twin: {_twin(tuner['twin'])}"
    if tuner.get("values"):
        yield "  values: " + ", ".join(f"{name} {value:g}" for name, value in tuner["values"].items())
    if tuner.get("audit"):
        columns = "action: {what} | reason: {why} | seconds ago: {age_s:.0f}"
        yield _titled("actions of the tuner, latest first", columns, tuner["audit"], text_columns=2)


def _twin(twin: Document) -> str:
    error = twin["error"]
    known = "error not measured yet"
    if error is not None:
        known = (
            f"mean TTFT {error['ttft_ratio']:+.1%}, TPOT {error['tpot_ratio']:+.1%} against the engines "
            f"({error['requests']} requests; limit {twin['max_error_ratio']:.0%})"
        )
    return f"step times {twin['step_times']}; {known}"


def _titled(title: str, columns: str, rows: Sequence[Document], *, text_columns: int) -> str:
    """Return a titled table. Columns with text come first."""
    return f"\n{title}\n{documents_table(columns, rows, text_columns=text_columns, key_columns=2)}"
