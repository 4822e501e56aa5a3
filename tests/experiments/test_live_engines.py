"""Policies on real engines: what is started for them, and the rate at which they are compared."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experiments.common.application import BUILD_APP, serve_config
from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.common.vllm_server import EngineCounters
from experiments.live_engines.run import engine_figures, figures_of
from experiments.live_engines.settings import LiveEnginesSettings, models_of, saturated_rate, servers_of
from serve_app.bench.connection import BenchError
from serve_app.settings.loading import load_settings
from tests.metrics.builders import record


@pytest.fixture
def settings() -> LiveEnginesSettings:
    return read_settings(Catalogue().config("live_engines"), LiveEnginesSettings)


def test_each_variant_is_a_model_in_front_of_the_engine_with_its_chunk_limit(
    settings: LiveEnginesSettings, tmp_path: Path
) -> None:
    config = tmp_path / "serve.yaml"
    served = models_of(settings, {0: "http://a:1", 256: "http://b:2"})
    config.write_text(yaml.safe_dump(serve_config("live", served, BUILD_APP, 8_000)))
    models = {model.name: model for model in load_settings(config).models}
    assert {name: model.scheduler.policy for name, model in models.items()} == {
        "fcfs": "fcfs",
        "fcfs-chunked": "fcfs",
        "ewsjf": "ewsjf",
    }
    engines = {name: model.pools[0].engine.remote for name, model in models.items()}
    assert {name: engine.endpoints for name, engine in engines.items() if engine} == {
        "fcfs": ("http://a:1",),
        "fcfs-chunked": ("http://b:2",),
        "ewsjf": ("http://b:2",),
    }


def test_variants_with_the_same_chunk_limit_share_a_server(settings: LiveEnginesSettings) -> None:
    servers = servers_of(settings)
    assert {chunk: one.served_model_names for chunk, one in servers.items()} == {
        0: ("fcfs",),
        256: ("fcfs-chunked", "ewsjf"),
    }
    assert servers[256].options["long_prefill_token_threshold"] == 256


def test_prompts_are_divided_and_arrivals_are_not(settings: LiveEnginesSettings) -> None:
    whole = replace(settings, prompts_divided_by=1.0).trace_of(3, rate_per_s=5.0)
    quarter = replace(settings, prompts_divided_by=4.0).trace_of(3, rate_per_s=5.0)
    assert [one.prompt_tokens for one in quarter.requests] == [
        max(1, round(one.prompt_tokens / 4)) for one in whole.requests
    ]
    assert [one.arrival_s for one in quarter.requests] == [one.arrival_s for one in whole.requests]
    assert "prompts divided by 4" in quarter.source


def test_without_a_rate_all_requests_wait_from_the_start(settings: LiveEnginesSettings) -> None:
    trace = settings.trace_of(3)
    assert len(trace.requests) == settings.requests
    assert trace.span_s == 0


def test_filling_and_emptying_the_batch_do_not_count_as_saturation() -> None:
    # Two at a time, one end a second from the tenth on; the last dispatch is at 13 s, the tail is slow.
    ends = [5.0, 10.0, 11.0, 12.0, 13.0, 50.0, 90.0]
    dispatches = [0.0, 0.0, 5.0, 10.0, 11.0, 12.0, 13.0]
    records = [record(dispatched_at=at, finished_at=end) for at, end in zip(dispatches, ends, strict=True)]
    assert saturated_rate(records, in_batch=2) == pytest.approx((4 - 2) / (13.0 - 11.0))


def test_too_few_requests_tell_no_saturated_rate() -> None:
    with pytest.raises(BenchError, match="2 requests do not fill a batch of 32 for long"):
        saturated_rate([record(), record()], in_batch=32)


def test_the_first_tenth_of_a_run_is_not_measured() -> None:
    records = [
        record(
            arrived_at=float(number),
            dispatched_at=float(number),
            first_token_at=number + (1_000.0 if number < 2 else 4.0),
            finished_at=number + 2_000.0,
            prompt_tokens=100 if number % 2 else 1_000,
        )
        for number in range(20)
    ]
    # In the order of their ends, as a load generator has them.
    figures = figures_of(records[::-1], short_at_tokens=512)
    assert figures["short_ttft_mean_s"] == pytest.approx(4.0)
    assert (figures["requests"], figures["completed"]) == (20, 20)


def test_the_engine_tells_what_its_steps_computed() -> None:
    counted = EngineCounters(steps=50, step_tokens=1_000, started=20, queue_wait_s=10.0, preemptions=0)
    figures = engine_figures(counted)
    assert (figures["tokens_per_step"], figures["engine_wait_mean_s"]) == (20.0, 0.5)
    assert engine_figures(EngineCounters(0, 0, 0, 0, 0))["tokens_per_step"] is None
