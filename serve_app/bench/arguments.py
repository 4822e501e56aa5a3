"""The arguments of `python -m serve_app bench`, and the settings that they make."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from serve_app.bench.bodies import BenchEndpoint, BodyKind, BodySettings
from serve_app.bench.connection import BenchError
from serve_app.bench.load import LATE_AFTER_S, ClientFigures, LoadSettings
from serve_app.command import add_report_argument, positive_float, positive_int
from serve_app.metrics.slo import Slo
from serve_app.metrics.summary import SHORT_AT_TOKENS, SummaryRules
from serve_app.workloads.catalog import WorkloadSettings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add every argument."""
    parser.add_argument("--url", required=True, help="the endpoint, such as http://127.0.0.1:8000")
    _configure_comparison(parser.add_argument_group("comparison"))
    _configure_workload(parser.add_argument_group("workload"))
    _configure_requests(parser.add_argument_group("requests"))
    _configure_results(parser.add_argument_group("results"))


def _configure_comparison(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--compare",
        metavar="URL",
        help="a second endpoint, which gets the same requests in turns with the first: prints the "
        "differences with their 95 %% intervals",
    )
    group.add_argument(
        "--slice-s",
        type=positive_float,
        default=10.0,
        help="seconds of the trace that one endpoint gets before it is the other's turn (%(default)s)",
    )
    group.add_argument("--compare-model", help="the model to ask the second endpoint for (as for the first)")
    group.add_argument("--compare-api-key", help="of the second endpoint (that of the first)")


def _configure_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--trace", required=True, help="azure-code, azure-conv, lmsys, paper-mix, or a trace file"
    )
    group.add_argument("--rate", type=positive_float, help="requests per second (the trace's own)")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--duration", type=positive_float, help="seconds for which requests arrive")
    size.add_argument("--requests", type=positive_int, help="how many requests")
    group.add_argument("--tenants", help="8, 8:1.2 (Zipf exponent) or search=3,chat=1 (weights)")
    group.add_argument("--priorities", help="shares of priority classes: interactive=1,batch=3")
    group.add_argument("--traces-folder", type=Path, help="where trace files lie (EWSJF_TRACES)")
    group.add_argument("--seed", type=int, default=0, help="of all chance in the run (%(default)s)")


def _configure_requests(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--model", help="the model to ask for (the first that the endpoint serves)")
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="(OPENAI_API_KEY)")
    group.add_argument(
        "--endpoint",
        choices=[one.name.lower() for one in BenchEndpoint],
        default="chat",
        help="(%(default)s)",
    )
    group.add_argument(
        "--body",
        type=BodyKind,
        choices=list(BodyKind),
        default=BodyKind.EMULATED,
        help="emulated: exact token counts by extra fields; text: for real engines (%(default)s)",
    )
    group.add_argument("--bytes-per-token", type=positive_float, default=5.0, help="of text (%(default)s)")
    group.add_argument("--max-tokens", type=int, help="what clients state (the true length; 0: nothing)")
    group.add_argument("--ignore-eos", action="store_true", help="exact lengths from a real vLLM (body text)")
    group.add_argument("--no-stream", action="store_true", help="ask for whole answers")
    group.add_argument("--timeout-s", type=positive_float, default=600.0, help="per request (%(default)s)")
    group.add_argument("--max-in-flight", type=positive_int, default=4096, help="(%(default)s)")


def _configure_results(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--warm-up-s", type=float, default=0.0, help="leave out requests that arrive earlier")
    group.add_argument("--slo-ttft-s", type=positive_float, default=2.0, help="for goodput (%(default)s)")
    group.add_argument("--slo-tpot-s", type=positive_float, default=0.08, help="for goodput (%(default)s)")
    group.add_argument(
        "--short-at", type=positive_int, default=SHORT_AT_TOKENS, help="longest short prompt (%(default)s)"
    )
    group.add_argument("--label", default="live", help="`policy` in the JSON (%(default)s)")
    group.add_argument("--json", type=Path, metavar="OUT", help="write metrics and provenance")
    group.add_argument("--records", type=Path, metavar="OUT", help="write raw records, a JSON object a line")
    group.add_argument("--plot", type=Path, metavar="DIR", help="write a TTFT distribution and a timeline")
    add_report_argument(group)


def workload(args: argparse.Namespace) -> WorkloadSettings:
    """The requests, with their arrival times."""
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
    """The contents of request bodies.

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
    )


def load_settings(args: argparse.Namespace) -> LoadSettings:
    """The limits of the run."""
    return LoadSettings(timeout_s=args.timeout_s, max_in_flight=args.max_in_flight, stream=not args.no_stream)


def rules(args: argparse.Namespace) -> SummaryRules:
    """The rules of the summary."""
    return SummaryRules(
        slo=Slo(ttft_s=args.slo_ttft_s, tpot_s=args.slo_tpot_s), short_at_tokens=args.short_at
    )


def client_warnings(client: ClientFigures, total: int) -> Iterator[str]:
    """What the client itself did to the figures of so many requests."""
    if client.interrupted:
        yield "interrupted: the figures are of the requests that had been sent"
    if client.late > total / 100:
        yield (
            f"the client was late: {client.late:,} of {total:,} requests were sent more than "
            f"{LATE_AFTER_S * 1000:.0f} ms after their time, which counts as latency: lower the rate, or "
            "give the client a core of its own"
        )
    if client.held_back:
        yield f"{client.held_back:,} requests were held back at the limit: raise --max-in-flight"
    if client.wrong_length:
        yield f"{client.wrong_length:,} answers do not have the length in the trace"
    if client.without_usage:
        yield f"{client.without_usage:,} answers have no usage: token counts are those of the trace"
