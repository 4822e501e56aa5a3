"""`bench --url A --compare B`: two endpoints in turns, and the difference between them."""

import argparse
import asyncio
from collections.abc import Callable, Sequence

import uvloop

from serve_app.bench import arguments
from serve_app.bench.compare_report import comparison_table, comparison_warnings, outcomes
from serve_app.bench.comparison import compare
from serve_app.bench.connection import BenchError, Target
from serve_app.bench.endpoint import served_models
from serve_app.bench.interleave import ComparedEndpoint, Interleaved, interleave
from serve_app.bench.load import LoadSettings
from serve_app.bench.pages.comparison_page import ComparedRun, comparison_report
from serve_app.bench.report import write_records
from serve_app.command import command_line, given_arguments, progress_bar, say, warn, write_json
from serve_app.metrics.record import RequestRecord
from serve_app.provenance import provenance
from serve_app.reports.document import Origin
from serve_app.reports.page import write_report
from serve_app.tables import paragraph
from serve_app.workloads.trace import Trace

# Secrets, and arguments of the command line itself.
_NOT_SETTINGS = frozenset({"api_key", "compare_api_key", "command"})


def compare_endpoints(args: argparse.Namespace, trace: Trace, settings: LoadSettings) -> int:
    """Run the comparison, and print and write it; returns the exit status of the command.

    Raises:
        BenchError: an endpoint cannot be used, or an argument means nothing here.
    """
    if args.plot is not None:
        raise BenchError("--plot draws one endpoint: leave it out with --compare")
    endpoints = (
        _endpoint(args, args.url, args.api_key, args.model),
        _endpoint(args, args.compare, args.compare_api_key or args.api_key, args.compare_model or args.model),
    )
    played = _drive(trace, endpoints, settings, args.slice_s)
    first = trace.requests[0].arrival_s + args.warm_up_s
    late = {number for number, request in enumerate(trace.requests) if request.arrival_s >= first}
    pairs = [pair for place, pair in enumerate(played.pairs) if place in late]
    if not pairs:
        raise BenchError("no slice was completed at both endpoints after the warm-up: nothing to compare")
    found = compare(pairs)
    played = Interleaved(pairs, played.client)
    say(
        f"{paragraph(f'{trace.title}: {trace.source}')}\n\n"
        f"{comparison_table(found, (args.url, args.compare))}"
    )
    warnings = (*comparison_warnings(found), *arguments.client_warnings(played.client, 2 * len(pairs)))
    for warning in warnings:
        warn(warning)
    _write(ComparedRun(args=args, trace=trace, found=found, played=played), warnings)
    return 0 if found.completed_by_both else 1


def _endpoint(args: argparse.Namespace, url: str, api_key: str | None, model: str | None) -> ComparedEndpoint:
    target = Target.parse(url)
    named = argparse.Namespace(**{**vars(args), "url": url, "api_key": api_key, "model": model})
    return ComparedEndpoint(target, arguments.body_settings(named, served_models(target, api_key)))


def _drive(
    trace: Trace, endpoints: tuple[ComparedEndpoint, ComparedEndpoint], settings: LoadSettings, slice_s: float
) -> Interleaved:
    async def drive(on_record: Callable[[RequestRecord], object]) -> Interleaved:
        return await interleave(trace, endpoints, settings, slice_s, on_record)

    with progress_bar("requests", 2 * len(trace.requests)) as advance:  # noqa: SIM117 - the bar ends after the loop
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(drive(lambda _: advance()))


def _write(run: ComparedRun, warnings: Sequence[str]) -> None:
    args, found, played = run.args, run.found, run.played
    origin = provenance(run.trace, given_arguments(args, leave_out=_NOT_SETTINGS), [args.seed])
    if args.json is not None:
        sides = zip(("A", "B"), (args.url, args.compare), outcomes(played), strict=True)
        document = {
            "endpoints": {name: {"url": url, "outcomes": dict(ended)} for name, url, ended in sides},
            "comparison": found.as_json(),
            "provenance": origin,
        }
        write_json(args.json, document)
    if args.report is not None:
        called = command_line(args, [args.api_key, args.compare_api_key])
        write_report(args.report, comparison_report(run, Origin(origin, called), warnings))
    if args.records is not None:
        write_records(args.records, (each for pair in played.pairs for each in (pair.base, pair.other)))
