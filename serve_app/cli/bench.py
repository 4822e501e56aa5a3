"""Command `bench`: open-loop load against a live endpoint."""

import argparse
import asyncio
import json
import os
import re
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import uvloop

from serve_app.cli.command import (
    Command,
    add_number,
    add_whole,
    arguments_as_json,
    print_result,
    progress_bar,
    warn,
    write_json,
    writing,
)
from serve_app.cli.http_client import ConnectionFailedError, request
from serve_app.core.metrics.slo import Slo
from serve_app.core.metrics.summary import SHORT_AT_TOKENS, SummaryRules, summarise
from serve_app.lab.bench.endpoint import BenchError, base_url
from serve_app.lab.bench.load import (
    LATE_AFTER_S,
    BenchEndpoint,
    BodyFactory,
    BodyKind,
    BodySettings,
    ClientStats,
    LoadResult,
    LoadSettings,
    OpenLoop,
)
from serve_app.lab.bench.report import from_zero, run_as_json, table, write_records
from serve_app.lab.provenance import provenance
from serve_app.lab.tables import paragraph
from serve_app.lab.workloads.catalog import WorkloadSettings, notes_on, resolve
from serve_app.lab.workloads.trace import Trace


def configure(parser: argparse.ArgumentParser) -> None:
    """Add all arguments."""
    parser.add_argument("--url", required=True, help="URL of the endpoint, such as http://127.0.0.1:8000")
    _configure_workload(parser.add_argument_group("workload"))
    _configure_requests(parser.add_argument_group("requests"))
    _configure_results(parser.add_argument_group("results"))


def _configure_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--trace",
        required=True,
        help="azure-code, azure-conv, lmsys, paper-mix or a trace file; names joined by + are merged",
    )
    add_number(group, "--rate", "requests per second (default: the trace's rate)")
    size = group.add_mutually_exclusive_group()
    add_number(size, "--duration", "duration of the arrivals in seconds")
    add_whole(size, "--requests", "number of requests")
    group.add_argument("--tenants", help="tenants: 8, 8:1.2 (Zipf exponent) or search=3,chat=1 (weights)")
    group.add_argument("--priorities", help="shares of priority classes: interactive=1,batch=3")
    group.add_argument("--traces-folder", type=Path, help="folder of trace files (default: EWSJF_TRACES)")
    group.add_argument(
        "--seed", type=int, default=0, help="seed of all random numbers (default: %(default)s)"
    )


def _configure_requests(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--model", help="model (default: the first that the endpoint serves)")
    group.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="API key (default: OPENAI_API_KEY)"
    )
    group.add_argument(
        "--endpoint",
        choices=[one.name.lower() for one in BenchEndpoint],
        default="chat",
        help="API to use (default: %(default)s)",
    )
    group.add_argument(
        "--body",
        type=BodyKind,
        choices=list(BodyKind),
        default=BodyKind.EMULATED,
        help="emulated: exact token counts in extra fields; "
        "text: prompts for real engines (default: %(default)s)",
    )
    add_number(group, "--bytes-per-token", "bytes per token of --body text", 5.0)
    group.add_argument(
        "--max-tokens",
        type=int,
        help="max_tokens of all requests; 0 for none (default: the true output length)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="set ignore_eos, so that a real vLLM generates the exact lengths",
    )
    group.add_argument(
        "--no-stream", action="store_true", help="request complete responses instead of streams"
    )
    add_number(group, "--timeout-s", "time limit of a request", 600.0)
    add_whole(group, "--max-in-flight", "maximum concurrent requests", 4096)


def _configure_results(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--warm-up-s", type=float, default=0.0, help="exclude requests that arrive earlier")
    add_number(group, "--slo-ttft-s", "TTFT limit of goodput", 2.0)
    add_number(group, "--slo-tpot-s", "TPOT limit of goodput", 0.08)
    add_whole(group, "--short-at", "maximum tokens of a short prompt", SHORT_AT_TOKENS)
    group.add_argument("--json", type=Path, metavar="OUT", help="write metrics and provenance")
    group.add_argument(
        "--records", type=Path, metavar="OUT", help="write raw records, one JSON object per line"
    )


def workload_of(args: argparse.Namespace) -> WorkloadSettings:
    """Return the requests with their arrival times."""
    return WorkloadSettings(
        trace=args.trace,
        rate_per_s=args.rate,
        requests=args.requests,
        duration_s=args.duration,
        tenants=args.tenants,
        priorities=args.priorities,
        seed=args.seed,
        folder=args.traces_folder,
    )


def body_settings(args: argparse.Namespace, models: list[str]) -> BodySettings:
    """Return the contents of request bodies.

    Raises:
        BenchError: the endpoint does not serve the model.
    """
    if not models:
        raise BenchError(f"{args.url} serves no model")
    if args.model is not None and args.model not in models:
        raise BenchError(f"{args.url} does not serve {args.model!r}: it serves {', '.join(models)}")
    return BodySettings(
        model=args.model or models[0],
        kind=args.body,
        endpoint=BenchEndpoint[args.endpoint.upper()],
        stream=not args.no_stream,
        bytes_per_token=args.bytes_per_token,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        api_key=args.api_key,
        seed=args.seed,
    )


def load_settings(args: argparse.Namespace) -> LoadSettings:
    """Return the limits of the run."""
    return LoadSettings(timeout_s=args.timeout_s, max_in_flight=args.max_in_flight, stream=not args.no_stream)


def summary_rules(args: argparse.Namespace) -> SummaryRules:
    """Return the rules of the summary."""
    return SummaryRules(
        slo=Slo(ttft_s=args.slo_ttft_s, tpot_s=args.slo_tpot_s), short_at_tokens=args.short_at
    )


def client_warnings(client: ClientStats, total: int) -> Iterator[str]:
    """Yield warnings if the client itself affected the results of `total` requests."""
    if client.interrupted:
        yield "interrupted: the results cover only the requests that were sent"
    if client.late > total / 100:
        yield (
            f"the client was late: {client.late:,} of {total:,} requests were sent more than "
            f"{LATE_AFTER_S * 1000:.0f} ms late, which counts as latency: lower the rate, or "
            "run the client on a dedicated core"
        )
    if client.throttled:
        yield f"{client.throttled:,} requests were delayed by the client's limit: raise --max-in-flight"
    if client.wrong_length:
        yield f"{client.wrong_length:,} responses do not have the length in the trace"
    if client.without_usage:
        yield f"{client.without_usage:,} responses have no usage: their token counts are those of the trace"


_EXAMPLE = """example:
  ewsjf bench --url http://127.0.0.1:8000 --trace azure-conv --rate 20 --duration 60
"""


def _run(args: argparse.Namespace) -> int:
    url = base_url(args.url)
    trace = resolve(workload_of(args))
    for note in notes_on(trace):
        warn(note)
    settings = load_settings(args)
    _allow_connections(settings.max_in_flight)
    bodies = body_settings(args, served_models(url, args.api_key))
    preempted_before = preemptions_so_far(url, args.api_key)
    cpu_before_s = time.process_time()
    load = _drive(trace, url, bodies, settings)
    cpu_s = time.process_time() - cpu_before_s
    preempted = preemptions_so_far(url, args.api_key)
    records = [record for record in from_zero(load.records) if record.arrived_at >= args.warm_up_s]
    load = replace(load, records=records)
    known = preempted_before is not None and preempted is not None
    rules = summary_rules(args)
    summary = summarise(load.records, rules)
    summary = replace(summary, preemptions=(preempted or 0) - (preempted_before or 0) if known else None)
    print_result(f"{paragraph(f'{trace.title}: {trace.source}')}\n\n{table(summary)}")
    for warning in client_warnings(load.client, len(load.records)):
        warn(warning)
    if args.json is not None:
        run = {"seed": args.seed, "rate_per_s": trace.rate_per_s}
        run |= run_as_json(summary, load, rules, cpu_s)
        given = arguments_as_json(args, omit={"api_key"})
        found = provenance(trace.provenance(), given, [args.seed])
        write_json(args.json, {"runs": [run], "provenance": found})
    if args.records is not None:
        with writing(args.records) as draft:
            write_records(draft, load.records)
    return 0 if summary.completed else 1


def _allow_connections(wanted: int) -> None:
    """Raise the soft limit of open files, because each in-flight request has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 64
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BenchError(
            f"--max-in-flight {wanted} needs {needed} open files, but the limit is {hard}: lower it"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _drive(trace: Trace, url: str, bodies: BodySettings, settings: LoadSettings) -> LoadResult:
    """Send the requests with a progress bar, which ends after the event loop."""
    with progress_bar("requests", len(trace.requests)) as advance:  # noqa: SIM117 - see above
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(OpenLoop(url, BodyFactory(bodies), settings, lambda _: advance()).run(trace))


COMMAND = Command(example=_EXAMPLE, configure=configure, run=_run)


_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def served_models(url: str, api_key: str | None) -> list[str]:
    """Return the model names in `/v1/models`.

    Raises:
        BenchError: the endpoint cannot be reached, or does not answer like an OpenAI API.
    """
    url = f"{url}/v1/models"
    try:
        answer = request(url, api_key)
    except ConnectionFailedError as exc:
        raise BenchError(f"cannot reach {url}: {exc}; check that the server is running") from exc
    if not answer.is_success:
        raise BenchError(f"{url} returned {answer.status}: pass --api-key if it requires a key")
    try:
        return [str(model["id"]) for model in json.loads(answer.body)["data"]]
    except (ValueError, KeyError, TypeError) as exc:
        raise BenchError(f"{url} does not list models as the OpenAI API does: {exc!r}") from exc


def preemptions_so_far(url: str, api_key: str | None) -> int | None:
    """Return the preemptions of all engines from the endpoint's `/metrics`; None if not exposed."""
    try:
        answer = request(f"{url}/metrics", api_key)
        counts = [float(count) for count in _PREEMPTIONS.findall(answer.text if answer.is_success else "")]
    except (ConnectionFailedError, ValueError):
        return None
    return round(sum(counts)) if counts else None
