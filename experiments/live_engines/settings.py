"""Which policies are compared on real engines, and the application that stands in front of them."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any

from experiments.common.vllm_server import Option, VllmServerSettings
from serve_app.bench.connection import BenchError
from serve_app.metrics.record import RequestRecord
from serve_app.settings_base import POSITIVE, settings
from serve_app.workloads.catalog import WorkloadSettings, resolve
from serve_app.workloads.trace import Trace


@settings
class LiveVariant:
    """A policy with what belongs to it.

    Attributes:
        chunk_tokens: `long_prefill_token_threshold` of its engine; 0 is vLLM's default, no limit.
        scheduler: settings that are not the defaults.
    """

    policy: str
    chunk_tokens: int = 0
    scheduler: Mapping[str, Any] = field(default_factory=dict)


@settings
class LiveEnginesSettings:
    """What is compared, on what, under which load.

    Attributes:
        model: folder of the weights, or of tokenizer and configuration alone.
        engine: vLLM's own options, the same for all variants; `max_num_seqs` among them.
        environment: of the engines.
        prompts_divided_by: makes the trace's prompts fit an engine without a GPU.
        requests: in each run.
        load: share of the first variant's saturated rate.
    """

    model: str
    engine: Mapping[str, Option]
    environment: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, LiveVariant]
    trace: str
    prompts_divided_by: Annotated[float, POSITIVE] = 1.0
    short_at_tokens: int
    bytes_per_token: float = 5.0
    requests: Annotated[int, POSITIVE]
    repeats: Annotated[int, POSITIVE] = 3
    load: Annotated[float, POSITIVE]

    def __post_init__(self) -> None:
        if not self.variants:
            raise ValueError("an experiment needs at least one variant")
        if "max_num_seqs" not in self.engine:
            raise ValueError("engine.max_num_seqs must be given: a vLLM server does not tell it")

    @property
    def max_num_seqs(self) -> int:
        """Requests in an engine's batch."""
        return int(self.engine["max_num_seqs"])

    def trace_of(self, seed: int, rate_per_s: float | None = None) -> Trace:
        """The requests of a run; all at once without a rate."""
        asked = WorkloadSettings(trace=self.trace, rate_per_s=rate_per_s, requests=self.requests, seed=seed)
        trace = resolve(asked)
        return replace(
            trace,
            source=f"{trace.source}, prompts divided by {self.prompts_divided_by:g}",
            requests=tuple(
                replace(
                    one,
                    prompt_tokens=max(1, round(one.prompt_tokens / self.prompts_divided_by)),
                    arrival_s=0.0 if rate_per_s is None else one.arrival_s,
                )
                for one in trace.requests
            ),
        )


def saturated_rate(records: Sequence[RequestRecord], in_batch: int) -> float:
    """Requests per second that an engine finishes when all of them wait from the start.

    Counted from when the batch has turned over once until the last request is dispatched: at both ends the
    batch is full, so neither filling nor emptying it counts.

    Raises:
        BenchError: there were too few requests for that.
    """
    ends = sorted(record.finished_at for record in records if record.completed)
    last_dispatch = max((one.dispatched_at for one in records if one.dispatched_at is not None), default=0.0)
    last = bisect.bisect_right(ends, last_dispatch) - 1
    if last <= in_batch:
        raise BenchError(
            f"{len(records)} requests do not fill a batch of {in_batch} for long: ask for more requests"
        )
    return (last - in_batch) / (ends[last] - ends[in_batch])


def servers_of(settings: LiveEnginesSettings) -> dict[int, VllmServerSettings]:
    """One server for each chunk limit, by the limit; variants with the same limit share it."""
    return {
        chunk: VllmServerSettings(
            model=settings.model,
            served_model_names=tuple(
                name for name, variant in settings.variants.items() if variant.chunk_tokens == chunk
            ),
            options={**settings.engine, "long_prefill_token_threshold": chunk},
            environment=settings.environment,
        )
        for chunk in sorted({variant.chunk_tokens for variant in settings.variants.values()})
    }


def models_of(settings: LiveEnginesSettings, servers: Mapping[int, str]) -> list[dict[str, Any]]:
    """A model for each variant, in front of the engine with its chunk limit.

    Args:
        servers: URLs of the engines by their chunk limit.
    """
    return [
        _model(name, variant, servers[variant.chunk_tokens], settings.max_num_seqs)
        for name, variant in settings.variants.items()
    ]


def _model(name: str, variant: LiveVariant, url: str, max_num_seqs: int) -> dict[str, Any]:
    engine = {"remote": {"endpoints": [url], "max_num_seqs": max_num_seqs}}
    return {
        "name": name,
        "pools": [{"name": "all", "engine": engine, "resources": {"num_cpus": 0.1}}],
        # Nobody may be refused for having waited long: all variants do the same work.
        "scheduler": {
            "policy": variant.policy,
            "queue_timeout_s": {"default": 3_600.0},
            **variant.scheduler,
        },
    }
