"""Metrics of the emulated engine: those of vLLM that the application or its dashboards read.

They are updated at every step and scraped a few times per minute. So they are plain numbers, and Prometheus
objects are created at a scrape. All times are wall time: a speed-up divides them like the client's times.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_app.engines.model import EngineModelSettings, ModelSnapshot, StepOutcome

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LABELS = ("model_name", "engine")


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


class EngineMetrics(Collector):
    """Prometheus collector of one emulated engine.

    Args:
        model_name: value of the label `model_name`.
    """

    def __init__(self, model_name: str, settings: EngineModelSettings) -> None:
        self._labels = (model_name, "0")
        self._settings = settings
        self._snapshot: Callable[[], ModelSnapshot] | None = None
        self._generation_tokens = 0
        self._token_gaps = WeightedHistogram("Inter-token latency.", _TOKEN_GAP_S)
        self._step_tokens = WeightedHistogram("Tokens per engine step.", _STEP_TOKENS)
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
        self._step_tokens.observe(outcome.prefill_tokens + outcome.sequences)
        if outcome.sequences:
            self._token_gaps.observe(gap_s, outcome.sequences)
        self._generation_tokens += outcome.sequences + len(outcome.first_tokens)

    def collect(self) -> Iterable[Metric]:
        """Return all metrics, for the registry."""
        if self._snapshot is not None:
            snapshot = self._snapshot()
            yield from self._gauges(snapshot)
            yield from self._counters(snapshot)
        for name, histogram in (
            ("inter_token_latency_seconds", self._token_gaps),
            ("iteration_tokens_total", self._step_tokens),
        ):
            buckets, total = histogram.cumulative()
            family = HistogramMetricFamily(f"vllm:{name}", histogram.documentation, labels=_LABELS)
            family.add_metric(self._labels, buckets, total)
            yield family

    def _gauges(self, snapshot: ModelSnapshot) -> Iterable[Metric]:
        for name, documentation, value in (
            ("num_requests_running", "Requests in model execution batches.", snapshot.running),
            ("num_requests_waiting", "Requests waiting to be processed.", snapshot.waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", snapshot.kv_usage_ratio),
        ):
            yield self._family(GaugeMetricFamily, name, documentation, value)
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
            ("generation_tokens", "Generation tokens processed.", self._generation_tokens),
        ):
            yield self._family(CounterMetricFamily, name, documentation, value)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        documentation: str,
        value: float,
    ) -> Metric:
        family = kind(f"vllm:{name}", documentation, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family
