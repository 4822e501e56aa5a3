from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experiments.live.comparison import LiveExperiment, load_experiment, saturated_rate, serve_config
from serve_app.bench.connection import BenchError
from serve_app.settings.loading import load_settings
from tests.metrics.builders import record

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "experiments" / "live.yaml"


@pytest.fixture
def experiment() -> LiveExperiment:
    return load_experiment(SHIPPED)


def test_each_variant_is_a_model_in_front_of_the_engine_with_its_chunk_limit(
    experiment: LiveExperiment, tmp_path: Path
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(yaml.safe_dump(serve_config(experiment, {0: "http://a:1", 256: "http://b:2"})))
    models = {model.name: model for model in load_settings(config).models}
    assert {name: model.scheduler.policy for name, model in models.items()} == {
        "fcfs": "fcfs",
        "fcfs-chunked": "fcfs",
        "ewsjf": "ewsjf",
    }
    engines = {name: model.pools[0].engine.remote for name, model in models.items()}
    assert {name: engine.base_url for name, engine in engines.items() if engine} == {
        "fcfs": "http://a:1",
        "fcfs-chunked": "http://b:2",
        "ewsjf": "http://b:2",
    }


def test_prompts_are_divided_and_arrivals_are_not(experiment: LiveExperiment) -> None:
    whole = replace(experiment, prompts_divided_by=1.0).trace_of(3, rate_per_s=5.0)
    quarter = replace(experiment, prompts_divided_by=4.0).trace_of(3, rate_per_s=5.0)
    assert [one.prompt_tokens for one in quarter.requests] == [
        max(1, round(one.prompt_tokens / 4)) for one in whole.requests
    ]
    assert [one.arrival_s for one in quarter.requests] == [one.arrival_s for one in whole.requests]
    assert "prompts divided by 4" in quarter.source


def test_without_a_rate_all_requests_wait_from_the_start(experiment: LiveExperiment) -> None:
    trace = experiment.trace_of(3)
    assert len(trace.requests) == experiment.requests
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


def test_a_file_that_is_no_experiment_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(SHIPPED.read_text() + "\nmeasure: everything\n")
    with pytest.raises(BenchError, match=r"(?s)wrong\.yaml is not an experiment.*measure"):
        load_experiment(file)
