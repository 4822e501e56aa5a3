"""Command `status`: prints the state of a running application as tables."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from serve_app.cli.command import Command, add_whole, print_result
from serve_app.cli.http_client import ConnectionFailedError, HttpResponse, request
from serve_app.cli.serve.instance import instance_at, running_instances
from serve_app.errors import ServeAppError
from serve_app.lab.reports.tables import table_text
from serve_app.serving.access import read_admin_key
from serve_app.serving.scheduler.findings import endpoints_down

Document = Mapping[str, Any]

_LOCAL_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "EWSJF_API_KEY"
_MAX_COSTS = 10
_MAX_PROGRAMS = 15
_MAX_PROGRAM_NAME = 40


class StatusError(ServeAppError):
    """The application rejects the query, or its answer is invalid."""


class UnreachableError(StatusError):
    """The application does not answer at the address."""


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for an application's address and API key."""
    parser.add_argument(
        "--url",
        help="URL of the application (default: the one that "
        f"`serve` runs on this machine, else {_LOCAL_URL})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get(_KEY_VARIABLE),
        help=f"admin key (default: {_KEY_VARIABLE}, else the key that `serve` created on this machine)",
    )


def api_key_for(url: str, given: str | None) -> str | None:
    """Return the given key, or the one that `serve` created if the application runs on this machine."""
    own = instance_at(url, running_instances())
    return given or (None if own is None else read_admin_key(Path(own.folder)))


def _configure(parser: argparse.ArgumentParser) -> None:
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


def default_url() -> str:
    """Return the default address: that of the application on this machine.

    Raises:
        StatusError: several applications run.
    """
    running = list(running_instances())
    if len(running) > 1:
        known = ", ".join(f"{each.url} ({each.config})" for each in running)
        raise StatusError(f"several applications run here, choose one with --url: {known}")
    return running[0].url if running else _LOCAL_URL


def _run(args: argparse.Namespace) -> int:
    url = args.url or default_url()
    try:
        return _print_state(url, args)
    except UnreachableError as error:
        if args.url:
            raise
        raise UnreachableError(
            f"{error}; this is the default address: start the application there, or pass --url"
        ) from error


def _print_state(url: str, args: argparse.Namespace) -> int:
    api_key = api_key_for(url, args.api_key)
    if args.freeze_tuner or args.thaw_tuner:
        word = "freeze" if args.freeze_tuner else "thaw"
        models = get_document(url, f"/debug/tuner/{word}", api_key, method="POST")["models"]
        for model in models:
            print_result(f"{model['model']}: {model.get('error') or model.get('message', word)}")
        return 1 if any("error" in model for model in models) else 0
    status = get_document(url, "/debug/status", api_key)
    queue = get_document(url, "/debug/queue", api_key)
    costs = get_document(url, "/debug/costs", api_key)
    if args.json:
        print_result(json.dumps({"status": status, "queue": queue, "costs": costs}, indent=1))
        return 0
    pages = Pages(status["models"], queue["models"], costs["models"])
    for part in rendered(pages, args.sub_queues):
        print_result(part)
    return 0


def get_response(
    url: str, path: str, api_key: str | None, method: str = "GET", content: Document | None = None
) -> HttpResponse:
    """Return an application's response, whatever its status.

    Raises:
        UnreachableError: the application does not answer.
    """
    try:
        return request(url.rstrip("/") + path, api_key, method=method, content=content)
    except ConnectionFailedError as error:
        raise UnreachableError(f"{url} does not respond: {error}") from error


def get_document(
    url: str, path: str, api_key: str | None, method: str = "GET", content: Document | None = None
) -> Document:
    """Return a document of the application.

    Args:
        content: sent as JSON.

    Raises:
        UnreachableError: the application does not answer.
        StatusError: it rejects the request, or returns something else.
    """
    address = url.rstrip("/") + path
    answer = get_response(url, path, api_key, method, content)
    if not answer.is_success:
        hint = f"; --api-key or {_KEY_VARIABLE} must be an admin key" if answer.is_denied else ""
        raise StatusError(f"{address} returned {answer}{hint}")
    document = answer.document()
    if document is None or not isinstance(document.get("models"), list):
        raise StatusError(f"{address} is not a gateway of this project: its response has no list of models")
    return document


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
        yield from (f"  {each}" for each in endpoints_down(model))
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


def _replicas(replicas: Mapping[str, Document]) -> str:
    rows = []
    for name, replica in sorted(replicas.items(), key=lambda item: (item[1]["pool"], item[0])):
        report = replica["report"] or {}
        tpot_s = report.get("tpot_s")
        rows.append(
            (
                replica["pool"],
                name,
                replica["state"],
                str(replica["in_flight"]),
                _format_or_dash(report.get("running")),
                _format_or_dash(report.get("waiting")),
                _format_or_dash(report.get("kv_usage_ratio"), ".0%"),
                _format_or_dash(None if tpot_s is None else 1e3 * tpot_s, ".1f"),
            )
        )
    head = ("pool", "replica", "state", "in flight", "running", "engine queue", "KV used", "ms/token")
    return _titled("replicas", head, rows, text_columns=3)


def _learned_contexts(replicas: Mapping[str, Document]) -> Iterator[str]:
    """Yield context limits learned from rejections, for replicas that do not report one."""
    for name, replica in sorted(replicas.items()):
        if learned := replica.get("learned_context_tokens"):
            yield f"  {name} reports no context limit; learned from rejected requests: {learned:,} tokens"


def _format_or_dash(figure: float | None, form: str = "") -> str:
    """Format a value, or a dash if the engine does not expose it."""
    return "-" if figure is None else f"{figure:{form}}"


def _sub_queues(queue: Document, most: int) -> str:
    omitted = max(0, len(queue["sub_queues"]) - most) + queue["sub_queues_omitted"]
    title = f"sub-queues, by queue time of the head; policy {queue['policy']}"
    rows = [
        (
            sub_queue["priority"],
            sub_queue["tenant"],
            sub_queue["length_queue"],
            sub_queue["reason"],
            str(sub_queue["waiting"]),
            f"{sub_queue['wait_s']:.1f} s",
            f"{sub_queue['score']:.3g}",
        )
        for sub_queue in queue["sub_queues"][:most]
    ]
    head = ("class", "tenant", "length queue", "why", "waiting", "head queue time", "score")
    return _titled(title + (f"; {omitted} more" if omitted else ""), head, rows, text_columns=4)


def _programs(programs: Document) -> str:
    rows = [
        (
            row["tenant"],
            row["program"][:_MAX_PROGRAM_NAME],
            row["state"],
            ", ".join(row["replicas"]) or "-",
            str(row["conversations"]),
            str(row["turns"]),
            f"{row['context_tokens']:,}",
            f"{row['saved_tokens']:,}",
            *(f"{row[name]:.0f} s" for name in ("queued_s", "waiting_s", "engine_s", "gap_s")),
        )
        for row in programs["rows"][:_MAX_PROGRAMS]
    ]
    states = ", ".join(f"{count} {state}" for state, count in sorted(programs["recent_by_state"].items()))
    head = ("tenant", "program", "state", "resident on", "conversations", "turns")
    figures = ("context tokens", "tokens saved", "queue", "thereof for KV cache", "engine", "gaps")
    return _titled(f"programs: {states}", (*head, *figures), rows, text_columns=4)


def _tenants(served: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        (name, tenant, f"{counter:,.0f}")
        for name, counters in served.items()
        for tenant, counter in sorted(counters.items(), key=lambda item: -item[1])
    ]
    title = "service of tenants, divided by weight"
    return _titled(title, ("class", "tenant", "service"), rows, text_columns=2)


def _costs(costs: Document) -> str:
    rows = costs["rows"]
    more = f"; {len(rows) - _MAX_COSTS} more in /debug/costs" if len(rows) > _MAX_COSTS else ""
    # A scheduler of an older release does not report this.
    began = costs.get("since")
    since = "" if began is None else f", since {datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M} UTC"
    lines = [
        (
            row["tenant"],
            row["class"],
            row["pool"],
            f"{row['engine_seconds']:,.1f} s",
            f"{row['share']:.0%}",
            f"{row['imposed_delay_seconds']:,.1f} s",
        )
        for row in rows[:_MAX_COSTS]
    ]
    head = ("tenant", "class", "pool", "engine time", "share", "delay imposed on others")
    return _titled(f"cost by tenant{since}{more}", head, lines, text_columns=3)


def _tuner(tuner: Document) -> Iterator[str]:
    yield f"  tuner: {tuner['mode']}, {tuner['state']}"
    if tuner.get("twin"):
        yield f"  twin: {_twin(tuner['twin'])}"
    if tuner.get("values"):
        yield "  values: " + ", ".join(f"{name} {value:g}" for name, value in tuner["values"].items())
    if tuner.get("audit"):
        rows = [(each["what"], each["why"], f"{each['age_s']:.0f}") for each in tuner["audit"]]
        title = "actions of the tuner, latest first"
        yield _titled(title, ("action", "reason", "seconds ago"), rows, text_columns=2)


def _twin(twin: Document) -> str:
    error = twin["error"]
    known = "error not measured yet"
    if error is not None:
        known = (
            f"mean TTFT {error['ttft_ratio']:+.1%}, TPOT {error['tpot_ratio']:+.1%} against the engines "
            f"({error['requests']} requests; limit {twin['max_error_ratio']:.0%})"
        )
    return f"step times {twin['step_times']}; {known}"


def _titled(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int) -> str:
    """Return a titled table. Columns with text come first."""
    table = table_text(head, rows, text_columns=text_columns, key_columns=min(2, text_columns))
    return f"\n{title}\n{table}"


COMMAND = Command(
    example="example:\n  ewsjf status --url http://127.0.0.1:8000",
    configure=_configure,
    run=_run,
)
