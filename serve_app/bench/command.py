"""The command `python -m serve_app bench`: an open-loop run against a live endpoint."""

import argparse
import asyncio
import resource
import time
from collections.abc import Callable
from dataclasses import replace

import uvloop

from serve_app.bench import arguments
from serve_app.bench.bodies import BodyFactory, BodySettings
from serve_app.bench.compare_command import compare_endpoints
from serve_app.bench.connection import BenchError, ConnectionPool, Target
from serve_app.bench.endpoint import preemptions_so_far, served_models
from serve_app.bench.load import LoadResult, LoadSettings, OpenLoop
from serve_app.bench.report import from_zero, run_as_json, table, write_records
from serve_app.command import Command, given_arguments, progress_bar, say, warn, write_json
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.summary import Summary, summarise
from serve_app.provenance import provenance
from serve_app.tables import paragraph
from serve_app.workloads.catalog import notes_on, resolve
from serve_app.workloads.trace import Trace

_EXAMPLE = """example:
  python -m serve_app bench --url http://127.0.0.1:8000 --trace azure-conv --rate 20 --duration 60
  python -m serve_app bench --url http://before:8000 --compare http://after:8000 --trace azure-conv \\
      --rate 20 --duration 300
"""
# Secrets, and arguments of the command line itself.
_NOT_SETTINGS = frozenset({"api_key", "command"})


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
    for warning in arguments.client_warnings(load.client, len(load.records)):
        warn(warning)
    _write(args, trace, load, summary, cpu_s)
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


def _write(args: argparse.Namespace, trace: Trace, load: LoadResult, summary: Summary, cpu_s: float) -> None:
    if args.json is not None:
        settings = given_arguments(args, leave_out=_NOT_SETTINGS)
        run = {"policy": args.label, "seed": args.seed, "load": None, "rate_per_s": trace.rate_per_s}
        run |= run_as_json(summary, load, arguments.rules(args), cpu_s)
        write_json(args.json, {"runs": [run], "provenance": provenance(trace, settings, [args.seed])})
    if args.records is not None:
        write_records(args.records, load.records)
    if args.plot is not None:
        # The plotting library takes half a second to load, which runs without plots need not wait for.
        from serve_app.bench.plots import write_plots  # noqa: PLC0415 - see above

        write_plots(args.plot, load.records, f"{args.label}: {trace.name}", args.short_at)


COMMAND = Command(
    name="bench",
    summary="open-loop load against a live endpoint, or against two in turns, from a trace",
    example=_EXAMPLE,
    configure=arguments.configure,
    run=_run,
)
