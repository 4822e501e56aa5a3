"""The emulated engine's `/metrics`: names, labels and buckets are vLLM's, so dashboards and scrapers work.

Counting happens at every step, scraping a few times a minute; so the counts are plain numbers here, and the
Prometheus objects are made when somebody asks. All times are wall time: with a speed-up they shrink as the
client's do.
"""

import bisect
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.engine_model import (
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
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class WeightedHistogram:
    """A histogram that takes the same value many times at the cost of once."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum of all values."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        return buckets, self._sum


def _token_buckets(most: int) -> list[float]:
    """1, 2, 5, 10, ... up to `most`, as vLLM has them for token counts."""
    bounds: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > most:
                return bounds
            bounds.append(digit * power)
        power *= 10


class EngineMetrics(Collector):
    """Counts of one emulated engine.

    Args:
        model_name: the label `model_name`.
        settings: what the engine can hold.
    """

    def __init__(self, model_name: str, settings: EngineModelSettings) -> None:
        self._labels = [model_name, "0"]
        self._settings = settings
        self._snapshot: Callable[[], ModelSnapshot] | None = None
        self._finish_reasons = dict.fromkeys(_FINISH_REASONS, 0)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._rejections = 0
        tokens = _token_buckets(settings.max_model_len)
        self._histograms: dict[str, tuple[str, WeightedHistogram]] = {}
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN_S
        )
        self._token_gap_s = self._histogram(
            "inter_token_latency_seconds", "Inter-token latency.", _TOKEN_GAP_S
        )
        self._tpot_s = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per output token of a request.", _TOKEN_GAP_S
        )
        self._e2e_s = self._histogram("e2e_request_latency_seconds", "Latency of a request.", _LATENCY_S)
        self._queue_s = self._histogram("request_queue_time_seconds", "Time spent waiting.", _LATENCY_S)
        self._inference_s = self._histogram(
            "request_inference_time_seconds", "Time spent running.", _LATENCY_S
        )
        self._prefill_s = self._histogram(
            "request_prefill_time_seconds", "Time spent in prefill.", _LATENCY_S
        )
        self._decode_s = self._histogram("request_decode_time_seconds", "Time spent in decode.", _LATENCY_S)
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._request_output = self._histogram("request_generation_tokens", "Tokens generated.", tokens)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens per engine step.", _STEP_TOKENS)
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a request.", _PREEMPTIONS
        )
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def watch(self, snapshot: Callable[[], ModelSnapshot]) -> None:
        """Read gauges from here."""
        self._snapshot = snapshot

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def count_step(self, outcome: StepOutcome, gap_s: float) -> None:
        """A step has ended, `gap_s` after the one before it."""
        self._step_tokens.observe(outcome.prefill_tokens + outcome.sequences)
        if outcome.sequences:
            self._token_gap_s.observe(gap_s, outcome.sequences)
        self._generation_tokens += outcome.sequences + len(outcome.first_tokens)

    def count_finished(self, sequence: EngineSequence, finish_reason: str, speed_up: float) -> None:
        """A sequence has finished; its times are on the model's clock."""
        self._finish_reasons[finish_reason] += 1
        self._prompt_tokens += sequence.prompt_tokens
        self._request_prompt.observe(sequence.prompt_tokens)
        self._request_preemptions.observe(sequence.preemptions)
        arrived, scheduled = sequence.arrived_at, sequence.scheduled_at
        first, finished = sequence.first_token_at, sequence.finished_at
        assert scheduled is not None
        assert finished is not None
        # The model's clock may lag behind an arrival by a fraction of a step.
        self._queue_s.observe(max(0.0, scheduled - arrived) / speed_up)
        self._inference_s.observe((finished - scheduled) / speed_up)
        self._e2e_s.observe(max(0.0, finished - arrived) / speed_up)
        if first is None:
            return
        self._request_output.observe(sequence.output_tokens)
        self._first_token_s.observe(max(0.0, first - arrived) / speed_up)
        self._prefill_s.observe((first - scheduled) / speed_up)
        self._decode_s.observe((finished - first) / speed_up)
        if sequence.output_tokens > 1:
            self._tpot_s.observe((finished - first) / speed_up / (sequence.output_tokens - 1))

    def count_unfinished(self, sequence: EngineSequence) -> None:
        """A sequence was taken out by its client, or lost with the engine."""
        self._finish_reasons["abort" if sequence.state is SequenceState.ABORTED else "error"] += 1

    def count_rejection(self) -> None:
        """A request was refused because `max_num_queued_reqs` was reached."""
        self._rejections += 1

    def collect(self) -> Iterable[Metric]:
        """Everything, for the registry."""
        if self._snapshot is not None:
            snapshot = self._snapshot()
            yield from self._gauges(snapshot)
            yield from self._counters(snapshot)
        for name, (documentation, histogram) in self._histograms.items():
            buckets, total = histogram.cumulative()
            family = HistogramMetricFamily(f"vllm:{name}", documentation, labels=["model_name", "engine"])
            family.add_metric(self._labels, buckets, total)
            yield family

    def _histogram(self, name: str, documentation: str, bounds: Sequence[float]) -> WeightedHistogram:
        histogram = WeightedHistogram(bounds)
        self._histograms[name] = (documentation, histogram)
        return histogram

    def _gauges(self, snapshot: ModelSnapshot) -> Iterable[Metric]:
        labels = ["model_name", "engine"]
        for name, documentation, value in (
            ("num_requests_running", "Requests in model execution batches.", snapshot.running),
            ("num_requests_waiting", "Requests waiting to be processed.", snapshot.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", snapshot.kv_usage_ratio),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", documentation, labels=labels)
            gauge.add_metric(self._labels, value)
            yield gauge
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", labels=[*labels, "reason"]
        )
        reasons.add_metric([*self._labels, "capacity"], snapshot.waiting)
        reasons.add_metric([*self._labels, "deferred"], 0)
        yield reasons
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=["block_size", "enable_prefix_caching", "engine", "num_gpu_blocks"],
        )
        settings = self._settings
        # vLLM counts the block that it sets aside as padding; ours are all usable.
        blocks = str(settings.kv_blocks + 1)
        cache.add_metric([str(settings.block_size), str(settings.prefix_caching), "0", blocks], 1)
        yield cache

    def _counters(self, snapshot: ModelSnapshot) -> Iterable[Metric]:
        labels = ["model_name", "engine"]
        for name, documentation, value in (
            ("num_preemptions", "Preemptions.", snapshot.preemptions),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", snapshot.prefix_queries_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", snapshot.prefix_hits_tokens),
            ("prompt_tokens", "Prefill tokens processed.", self._prompt_tokens),
            ("generation_tokens", "Generation tokens processed.", self._generation_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", documentation, labels=labels)
            counter.add_metric(self._labels, value)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Successfully processed requests.", labels=[*labels, "finished_reason"]
        )
        for reason, count in self._finish_reasons.items():
            success.add_metric([*self._labels, reason], count)
        yield success
        rejections = CounterMetricFamily(
            "vllm:admission_rejections", "Requests refused by a queue limit.", labels=["model_name", "reason"]
        )
        rejections.add_metric([self._labels[0], "max_num_queued_reqs"], self._rejections)
        yield rejections
