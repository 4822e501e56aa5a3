"""Metrics reference: the application's Prometheus metrics, read from its collectors."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from docs_reference.markdown import code, document, sentence, table
from docs_reference.metric_advice import METRIC_ADVICE
from serve_app.core import SchedulerSettings
from serve_app.core.scaling import ScalingSettings
from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.gateway.telemetry import Telemetry
from serve_app.serving.scheduler.live_scaling import LiveScaling
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions
from serve_app.serving.scheduler.usage import UsageLedger
from serve_app.serving.state import StatePersister, StateStore

_INTRODUCTION = """
# Metrics reference

`GET /metrics` of the application returns the metrics of all gateways and of the scheduler of every model.
The scheduler's metrics include autoscaling and the tuner. `GET /metrics/engines` lists the engines' own
metrics pages, which the same address serves; see [scraping](../monitoring.md#scraping).

Names are those of the samples, so counters end in `_total`. A histogram `x` has the samples `x_bucket`,
`x_sum` and `x_count`. Times are in seconds. Each series of a gateway has the label `gateway`; sum over it.
"""


@dataclass(frozen=True, slots=True)
class _Section:
    """Metrics of one kind of process; `build` creates their collectors."""

    title: str
    text: str
    build: Callable[[], Awaitable[object]]


def metrics_page() -> str:
    """Return the whole page."""
    heads = ("Metric", "Type", "Labels", "Meaning", "What to do")
    parts = []
    for section in _SECTIONS:
        rows = [(*row, _advice(row[0])) for row in asyncio.run(_rows(section.build))]
        advised = any(row[-1] for row in rows)
        shown = table(heads, rows) if advised else table(heads[:-1], [row[:-1] for row in rows])
        parts += [f"## {section.title}", section.text, shown]
    return document(_INTRODUCTION, *parts)


def _advice(name: str) -> str:
    """Return the action for a metric that stands out; empty for metrics of engines.

    Raises:
        KeyError: a metric of ours has no advice.
    """
    bare = name.strip("`")
    return METRIC_ADVICE[bare] if bare.startswith("ewsjf_") else ""


def metric_names() -> frozenset[str]:
    """Return every name in the tables."""
    return frozenset(row[0].strip("`") for section in _SECTIONS for row in asyncio.run(_rows(section.build)))


def application_metrics() -> dict[str, tuple[str, set[str]]]:
    """Return type and labels of every application metric, by name; labels of all exporters are merged."""
    found: dict[str, tuple[str, set[str]]] = {}
    for section in _SECTIONS:
        for name, kind, labels, _ in asyncio.run(_rows(section.build)):
            if name.startswith("`ewsjf_"):
                _, known = found.setdefault(name.strip("`"), (kind, set()))
                known.update(label.strip("`") for label in labels.split(", "))
    return found


async def _rows(build: Callable[[], Awaitable[object]]) -> Iterable[Sequence[str]]:
    with _registered() as collectors:
        kept = await build()
        found = {row[0]: row for collector in collectors for row in _described(collector)}
    del kept
    return [found[name] for name in sorted(found)]


@contextmanager
def _registered() -> Iterator[list[Collector]]:
    """Collect what is registered with any registry while the block runs."""
    seen: list[Collector] = []
    register = CollectorRegistry.register

    def recording(registry: CollectorRegistry, collector: Collector) -> None:
        seen.append(collector)
        register(registry, collector)

    with patch.object(CollectorRegistry, "register", recording):
        yield seen


def _described(collector: Collector) -> Iterator[tuple[str, str, str, str]]:
    for family in collector.collect():
        # A metric without series has no sample that would show its labels.
        holder = collector if isinstance(collector, MetricWrapperBase) else family
        labels: Sequence[str] = holder._labelnames  # type: ignore[union-attr]  # noqa: SLF001
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield code(name), family.type, ", ".join(map(code, labels)), sentence(family.documentation)


async def _gateway() -> object:
    return Telemetry("0", log_requests=False, upstream_counts=lambda: (0, 0), held_body_bytes=lambda: 0)


async def _scheduler() -> object:
    options = LiveSchedulerOptions(incarnation=1, channel=ChannelSettings())
    live = LiveScheduler(SchedulerSettings(model="model"), options)
    # Its gauges are created when a page is rendered.
    await live.exposition()
    return live


async def _scaling() -> object:
    return LiveScaling("model", ScalingSettings(), CollectorRegistry())


async def _usage() -> object:
    return UsageLedger("model", CollectorRegistry())


async def _learned_state() -> object:
    store = StateStore("memory://docs", "scheduler", "model")
    return StatePersister(store, "model", lambda: None, 1.0, CollectorRegistry())


async def _emulated_engine() -> object:
    engine = EmulatedEngine(EmulatedEngineSettings())
    # Its gauges need its clock, which ends with the event loop.
    await engine.start()
    return engine


_SECTIONS = (
    _Section("Gateway", "One set of series for each gateway and model.", _gateway),
    _Section("Scheduler", "One set of series for each model.", _scheduler),
    _Section(
        "Autoscaling",
        "Exported with the scheduler's metrics for every pool, also for pools that another system scales.",
        _scaling,
    ),
    _Section(
        "Usage",
        "Exported with the scheduler's metrics: usage by API key since the start of the scheduler's process. "
        "After 1,000 keys, further ones share the label `other`.",
        _usage,
    ),
    _Section(
        "Learned state",
        "Exported with the scheduler's metrics where `state_uri` is set.",
        _learned_state,
    ),
    _Section(
        "Emulated engine",
        "vLLM metrics that the emulated engine exports, under vLLM's names. Real vLLM engines export these "
        "and more; see vLLM's documentation.",
        _emulated_engine,
    ),
)
