"""Metrics of the emulated engine, with the names, labels and buckets of vLLM.

Metrics are updated at every step and scraped a few times per minute. So they are plain numbers, and
Prometheus objects are created at a scrape. All times are wall time: a speed-up divides them like the client's
times.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.engines.model import (
    EngineModelSettings,
    EngineSequence,
    ModelSnapshot,
    SequenceState,
    StepOutcome,
)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_LABELS = ("model_name", "engine")
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class WeightedHistogram:
    """Histogram that counts many equal values at the cost of one."""

    __slots__ = ("_bounds", "_counts", "_sum", "documentation")

    def __init__(self, documentation: str, bounds: Sequence[float]) -> None:
        self.documentation = documentation
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative counts by upper bound and the sum of all values, for `prometheus_client`."""
        bounds = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self._counts), strict=True)), self._sum


def _token_buckets(most: int) -> list[float]:
    """Return 1, 2, 5, 10, ... up to `most`: vLLM's buckets for token counts."""
    bounds: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return bounds
            bounds.append(digit * power)
        power *= 10


class EngineMetrics(Collector):
    """Prometheus collector of one emulated engine.

    Args:
        model_name: value of the label `model_name`.
    """

    def __init__(self, model_name: str, settings: EngineModelSettings) -> None:
        self._labels = (model_name, "0")
        self._settings = settings
        self._snapshot: Callable[[], ModelSnapshot] | None = None
        self._finish_reasons = dict.fromkeys(_FINISH_REASONS, 0)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._rejections = 0
        tokens = _token_buckets(settings.max_model_len)
        histograms: tuple[tuple[str, str, Sequence[float]], ...] = (
            ("time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN_S),
            ("inter_token_latency_seconds", "Inter-token latency.", _TOKEN_GAP_S),
            (
                "request_time_per_output_token_seconds",
                "Mean time per output token of a request.",
                _TOKEN_GAP_S,
            ),
            ("e2e_request_latency_seconds", "Latency of a request.", _LATENCY_S),
            ("request_queue_time_seconds", "Time spent waiting.", _LATENCY_S),
            ("request_inference_time_seconds", "Time spent running.", _LATENCY_S),
            ("request_prefill_time_seconds", "Time spent in prefill.", _LATENCY_S),
            ("request_decode_time_seconds", "Time spent in decode.", _LATENCY_S),
            ("request_prompt_tokens", "Prompt tokens of a request.", tokens),
            ("request_generation_tokens", "Tokens generated.", tokens),
            ("iteration_tokens_total", "Tokens per engine step.", _STEP_TOKENS),
            ("request_num_preemptions", "Preemptions of a request.", _PREEMPTIONS),
        )
        self._histograms = {name: WeightedHistogram(text, bounds) for name, text, bounds in histograms}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def watch(self, snapshot: Callable[[], ModelSnapshot]) -> None:
        """Set the source of the gauges."""
        self._snapshot = snapshot

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def count_step(self, outcome: StepOutcome, gap_s: float) -> None:
        """Count a step that ended `gap_s` after the previous one."""
        self._histograms["iteration_tokens_total"].observe(outcome.prefill_tokens + outcome.sequences)
        if outcome.sequences:
            self._histograms["inter_token_latency_seconds"].observe(gap_s, outcome.sequences)
        self._generation_tokens += outcome.sequences + len(outcome.first_tokens)

    def count_finished(self, sequence: EngineSequence, finish_reason: str, speed_up: float) -> None:
        """Count a finished sequence, whose times are on the model's clock."""
        self._finish_reasons[finish_reason] += 1
        self._prompt_tokens += sequence.prompt_tokens
        self._observe("request_prompt_tokens", sequence.prompt_tokens)
        self._observe("request_num_preemptions", sequence.preemptions)
        arrived, scheduled = sequence.arrived_at, sequence.scheduled_at
        first, finished = sequence.first_token_at, sequence.finished_at
        assert scheduled is not None
        assert finished is not None
        # The model's clock may lag behind an arrival by a fraction of a step.
        self._observe("request_queue_time_seconds", max(0.0, scheduled - arrived) / speed_up)
        self._observe("request_inference_time_seconds", (finished - scheduled) / speed_up)
        self._observe("e2e_request_latency_seconds", max(0.0, finished - arrived) / speed_up)
        if first is None:
            return
        decode_s = (finished - first) / speed_up
        self._observe("request_generation_tokens", sequence.output_tokens)
        self._observe("time_to_first_token_seconds", max(0.0, first - arrived) / speed_up)
        self._observe("request_prefill_time_seconds", (first - scheduled) / speed_up)
        self._observe("request_decode_time_seconds", decode_s)
        if sequence.output_tokens > 1:
            per_token_s = decode_s / (sequence.output_tokens - 1)
            self._observe("request_time_per_output_token_seconds", per_token_s)

    def count_unfinished(self, sequence: EngineSequence) -> None:
        """Count a sequence that was aborted by its client or lost with the engine."""
        self._finish_reasons["abort" if sequence.state is SequenceState.ABORTED else "error"] += 1

    def count_rejection(self) -> None:
        """Count a request that was rejected because of `max_num_queued_reqs`."""
        self._rejections += 1

    def collect(self) -> Iterable[Metric]:
        """Return all metrics, for the registry."""
        if self._snapshot is not None:
            snapshot = self._snapshot()
            yield from self._gauges(snapshot)
            yield from self._counters(snapshot)
        for name, histogram in self._histograms.items():
            buckets, total = histogram.cumulative()
            family = HistogramMetricFamily(f"vllm:{name}", histogram.documentation, labels=_LABELS)
            family.add_metric(self._labels, buckets, total)
            yield family

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _gauges(self, snapshot: ModelSnapshot) -> Iterable[Metric]:
        for name, documentation, value in (
            ("num_requests_running", "Requests in model execution batches.", snapshot.running),
            ("num_requests_waiting", "Requests waiting to be processed.", snapshot.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", snapshot.kv_usage_ratio),
        ):
            yield self._family(GaugeMetricFamily, name, documentation, {(): value})
        yield self._family(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "Waiting requests by reason.",
            {("capacity",): snapshot.waiting, ("deferred",): 0},
            "reason",
        )
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=["block_size", "enable_prefix_caching", "engine", "num_gpu_blocks"],
        )
        settings = self._settings
        # vLLM's count includes the block that it reserves as padding. All blocks of the emulated engine are
        # usable.
        blocks = str(settings.kv_blocks + 1)
        cache.add_metric([str(settings.block_size), str(settings.prefix_caching), "0", blocks], 1)
        yield cache

    def _counters(self, snapshot: ModelSnapshot) -> Iterable[Metric]:
        for name, documentation, value in (
            ("num_preemptions", "Preemptions.", snapshot.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", snapshot.prefix_queries_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", snapshot.prefix_hits_tokens),
            ("prompt_tokens", "Prefill tokens processed.", self._prompt_tokens),
            ("generation_tokens", "Generation tokens processed.", self._generation_tokens),
        ):
            yield self._family(CounterMetricFamily, name, documentation, {(): value})
        yield self._family(
            CounterMetricFamily,
            "request_success",
            "Successfully processed requests.",
            {(reason,): count for reason, count in self._finish_reasons.items()},
            "finished_reason",
        )
        rejections = CounterMetricFamily(
            "vllm:admission_rejections",
            "Requests that a queue limit rejected.",
            labels=["model_name", "reason"],
        )
        rejections.add_metric([self._labels[0], "max_num_queued_reqs"], self._rejections)
        yield rejections

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        documentation: str,
        values: Mapping[tuple[str, ...], float],
        *more_labels: str,
    ) -> Metric:
        """Return a family with one sample per value; `values` maps the values of `more_labels` to numbers."""
        family = kind(f"vllm:{name}", documentation, labels=(*_LABELS, *more_labels))
        for labels, value in values.items():
            family.add_metric((*self._labels, *labels), value)
        return family
