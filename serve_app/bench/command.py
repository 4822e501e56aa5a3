"""The command `python -m serve_app bench`: an open-loop run against a live endpoint."""

import argparse
import asyncio
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import uvloop

from serve_app.bench import arguments
from serve_app.bench.bodies import BodyFactory, BodySettings
from serve_app.bench.compare_command import compare_endpoints
from serve_app.bench.connection import BenchError, ConnectionPool, Target
from serve_app.bench.endpoint import preemptions_so_far, served_models
from serve_app.bench.load import LoadResult, LoadSettings, OpenLoop
from serve_app.bench.pages.run_page import BenchRun, bench_report
from serve_app.bench.report import from_zero, run_as_json, table, write_records
from serve_app.command import Command, command_line, given_arguments, progress_bar, say, warn, write_json
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.summary import summarise
from serve_app.provenance import provenance
from serve_app.reports.document import Origin
from serve_app.reports.page import write_report
from serve_app.tables import paragraph
from serve_app.workloads.catalog import notes_on, resolve
from serve_app.workloads.trace import Trace

_EXAMPLE = """example:
  python -m serve_app bench --url http://127.0.0.1:8000 --trace azure-conv --rate 20 --duration 60
  python -m serve_app bench --url http://before:8000 --compare http://after:8000 --trace azure-conv \\
      --rate 20 --duration 300
"""
# Secrets, and arguments of the command line itself.
_NOT_SETTINGS = frozenset({"api_key", "compare_api_key", "command"})


def _run(args: argparse.Namespace) -> int:
    target = Target.parse(args.url)
    trace = resolve(arguments.workload(args))
    for note in notes_on(trace):
        warn(note)
    if args.compare is not None:
        settings = arguments.load_settings(args)
        _allow_connections(settings.max_in_flight)
        return compare_endpoints(args, trace, settings)
    bodies = arguments.body_settings(args, served_models(target, args.api_key))
    settings = arguments.load_settings(args)
    _allow_connections(settings.max_in_flight)
    preempted_before = preemptions_so_far(target, args.api_key)
    cpu_before_s = time.process_time()
    load = _drive(trace, target, bodies, settings)
    cpu_s = time.process_time() - cpu_before_s
    preempted = preemptions_so_far(target, args.api_key)
    load = replace(load, records=_after_warm_up(from_zero(load.records), args.warm_up_s))
    known = preempted_before is not None and preempted is not None
    summary = summarise(load.records, arguments.rules(args))
    summary = replace(summary, preemptions=(preempted or 0) - (preempted_before or 0) if known else None)
    say(f"{paragraph(f'{trace.title}: {trace.source}')}\n\n{table(summary)}")
    warnings = list(arguments.client_warnings(load.client, len(load.records)))
    for warning in warnings:
        warn(warning)
    _write(BenchRun(args=args, trace=trace, load=load, summary=summary), cpu_s, warnings)
    return 0 if summary.completed else 1


def _allow_connections(wanted: int) -> None:
    """Raise the soft limit of open files, because each request under way has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 64
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BenchError(f"--max-in-flight {wanted} needs {needed} open files, the limit is {hard}: lower it")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _drive(trace: Trace, target: Target, bodies: BodySettings, settings: LoadSettings) -> LoadResult:
    async def drive(on_record: Callable[[RequestRecord], object]) -> LoadResult:
        pool = ConnectionPool(target)
        factory = BodyFactory(bodies, target.authority, target.path_prefix)
        try:
            return await OpenLoop(pool, factory, settings, on_record).run(trace)
        finally:
            pool.close()

    with progress_bar("requests", len(trace.requests)) as advance:  # noqa: SIM117 - the bar ends after the loop
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(drive(lambda _: advance()))


def _after_warm_up(records: list[RequestRecord], warm_up_s: float) -> list[RequestRecord]:
    return [record for record in records if record.arrived_at >= warm_up_s]


def _write(measured: BenchRun, cpu_s: float, warnings: Sequence[str]) -> None:
    args, trace, load, summary = measured.args, measured.trace, measured.load, measured.summary
    found = provenance(trace, given_arguments(args, leave_out=_NOT_SETTINGS), [args.seed])
    if args.json is not None:
        run = {"policy": args.label, "seed": args.seed, "load": None, "rate_per_s": trace.rate_per_s}
        run |= run_as_json(summary, load, arguments.rules(args), cpu_s)
        write_json(args.json, {"runs": [run], "provenance": found})
    if args.records is not None:
        write_records(args.records, load.records)
    if args.plot is not None:
        # The plotting library takes half a second to load, which runs without plots need not wait for.
        from serve_app.bench.plots import write_plots  # noqa: PLC0415 - see above

        write_plots(args.plot, load.records, f"{args.label}: {trace.name}", args.short_at)
    if args.report is not None:
        origin = Origin(found, command_line(args, [args.api_key, args.compare_api_key]))
        write_report(args.report, bench_report(measured, origin, warnings))


COMMAND = Command(
    name="bench",
    summary="open-loop load against a live endpoint, or against two in turns, from a trace",
    example=_EXAMPLE,
    configure=arguments.configure,
    run=_run,
)
