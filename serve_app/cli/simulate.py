"""Command `simulate`: compares policies in simulation, as a table and as JSON."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from serve_app.cli import workload_arguments as arguments
from serve_app.cli.command import (
    arguments_as_json,
    print_result,
    progress_bar,
    warn,
    write_json,
    writing,
)
from serve_app.core.commands import Conclude
from serve_app.core.decision_log import Decision, encode_decision, encode_header
from serve_app.engines.vllm import library
from serve_app.errors import SettingsError
from serve_app.lab.provenance import provenance
from serve_app.lab.simulation.report import Row, equal_seeds, policies_table, run_as_json, unequal_work
from serve_app.lab.simulation.run import (
    DIRECT,
    FleetSettings,
    RunResult,
    RunSettings,
    at_load,
    choose_trace,
    run_all,
    run_header,
    saturated_rates,
    simulate,
)
from serve_app.lab.simulation.simulation import EngineKind, write_partition
from serve_app.lab.tables import paragraph
from serve_app.lab.workloads import notes_on
from serve_app.tuning.strategic_loop import PAPER, LearnedPartitions, StrategicSettings

configure = arguments.configure
EXAMPLE = """example:
  ewsjf simulate --trace paper-mix --policy direct,fcfs,ewsjf --replicas 4 --load 0.9 \\
      --requests 10000 --seeds 5 --json out/policies.json
"""


# `ewsjf-paper` learns its queues with the published parameters.
_LEARNED = LearnedPartitions(by_policy={"ewsjf-paper": StrategicSettings(refine_and_prune=PAPER)})


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if args.first_seed < 0:
        raise SettingsError(f"--first-seed must not be negative, got {args.first_seed}")
    runs = _placed(arguments.runs(args, _LEARNED), args)
    for note in notes_on(choose_trace(runs[0].trace, runs[0].seed)):
        warn(note)
    for note in _notes_on_engines(args, runs[0].fleet):
        warn(note)
    results = list(_played(runs, args))
    rows = [run_as_json(result) for result in results]
    print_result(f"{paragraph(_heading(results[0]))}\n\n{policies_table(rows)}")
    for warning in _warnings(results, rows):
        warn(warning)
    if args.json is not None:
        write_json(args.json, {"runs": rows, "provenance": _provenance(args, results)})
    if args.save_partition is not None:
        _save_partition(args.save_partition, results)
    return 0


def _notes_on_engines(args: argparse.Namespace, fleet: FleetSettings) -> Iterator[str]:
    """Yield a note if recorded traffic is played on the engines of the default profile."""
    chosen = args.like_running or args.config is not None
    profiles = map(fleet.profile_of, fleet.replicas)
    if Path(args.trace).is_file() and not chosen and arguments.DEFAULT_PROFILE in profiles:
        yield (
            f"the simulated engines are those of the profile {arguments.DEFAULT_PROFILE}, not those that "
            f"served {args.trace}: pass --like-running, --config or --profile"
        )


def _placed(runs: list[RunSettings], args: argparse.Namespace) -> list[RunSettings]:
    """Return the runs with their rate and load."""
    with progress_bar("rates at load 1.0", len({run.seed for run in runs})) as on_rate:
        if args.load is not None:
            return at_load(runs, args.load, jobs=args.jobs, on_rate=on_rate)
        rates = saturated_rates(runs, jobs=args.jobs, on_rate=on_rate)
    placed = []
    for run, saturated in zip(runs, rates, strict=True):
        rate = run.rate_per_s or choose_trace(run.trace, run.seed).rate_per_s
        placed.append(replace(run, load=None if rate is None else rate / saturated))
    return placed


def _played(runs: list[RunSettings], args: argparse.Namespace) -> Iterator[RunResult]:
    if args.log is not None or args.jobs == 1 or len(runs) == 1:
        yield from _one_by_one(runs, args.log)
        return
    with progress_bar("runs", len(runs)) as advance:
        for result in run_all(runs, jobs=args.jobs):
            advance()
            yield result


def _one_by_one(runs: list[RunSettings], log: Path | None) -> Iterator[RunResult]:
    """Run in this process, where the progress bar counts requests; all decisions go to one file."""
    requests = sum(len(choose_trace(run.trace, run.seed).requests) for run in runs)
    with (
        nullcontext() if log is None else writing(log) as draft,
        nullcontext() if draft is None else draft.open("w") as file,
        progress_bar("requests", requests) as advance,
    ):

        def note(decision: Decision) -> None:
            if file is not None:
                file.write(encode_decision(decision) + "\n")
            for command in decision.commands:
                if isinstance(command, Conclude):
                    advance()

        for run in runs:
            if run.policy == DIRECT:
                result = simulate(run)
                advance(len(result.records))
            else:
                if file is not None:
                    file.write(encode_header(run_header(run)) + "\n")
                result = simulate(run, note)
            yield replace(result, records=[], measured=[])


def _heading(result: RunResult) -> str:
    settings, trace = result.settings, result.workload.trace
    pools = ", ".join(f"{count} in pool {pool}" for pool, count in settings.fleet.replicas.items())
    load = "" if settings.load is None else f", load {settings.load:.3g}"
    kind = settings.fleet.engine_kind
    scheduler = "" if kind is EngineKind.MODEL else f", scheduler {kind} {library.version()}"
    return (
        f"{trace.title}: {len(trace.requests):,} requests {trace.pace}{load}; {settings.fleet.profile}, "
        f"{pools}{scheduler}; short: at most {settings.short_at_tokens} tokens; means over seeds "
        "± 95 % interval"
    )


def _warnings(results: list[RunResult], rows: Sequence[Row]) -> Iterator[str]:
    dropped = {(one.settings.seed, one.workload.dropped, one.workload.clipped) for one in results}
    for seed, excluded, clipped in sorted(dropped):
        if excluded:
            yield f"seed {seed}: {excluded:,} requests exceed all context limits and were excluded"
        if clipped:
            yield f"seed {seed}: {clipped:,} responses are cut at the engine's context limit"
    for line in unequal_work(rows):
        yield f"unequal work: {line}"
    if equal := equal_seeds(rows):
        yield (
            f"all seeds gave the same run of {', '.join(equal)}, so there are no intervals: nothing in this "
            "trace depends on the seed"
        )


def _save_partition(path: Path, results: Sequence[RunResult]) -> None:
    for result in results:
        if result.partitions:
            with writing(path) as draft:
                write_partition(draft, result.partitions[-1][1])
            print_result(f"\n{path}: length queues of {result.settings.name}, seed {result.settings.seed}")
            return
    warn("no run learned length queues, so --save-partition writes no file: use ewsjf and more requests")


def _provenance(args: argparse.Namespace, results: list[RunResult]) -> dict[str, object]:
    given = arguments_as_json(args, omit={"jobs", "api_key"})
    if results[0].settings.fleet.engine_kind is not EngineKind.MODEL:
        given["vllm_version"] = library.version()
    seeds = sorted({result.settings.seed for result in results})
    return provenance(results[0].workload.trace.provenance(), given, seeds)
