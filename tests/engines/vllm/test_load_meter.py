from types import SimpleNamespace

import pytest

from serve_app.engines.vllm.engine import LoadMeter, StepRecorder


def test_the_meter_counts_requests_unknown_to_the_core_as_waiting() -> None:
    meter = LoadMeter()
    meter.record_step(0, running=4, kv_usage_ratio=0.5)
    load = meter.load(unfinished=6, now=0.0)
    assert (load.waiting, load.running, load.kv_usage_ratio) == (2, 4, 0.5)


def test_aborted_requests_run_no_more_though_the_last_step_had_them() -> None:
    meter = LoadMeter()
    meter.record_step(0, running=4, kv_usage_ratio=0.5)
    assert meter.load(unfinished=1, now=0.0).running == 1
    idle = meter.load(unfinished=0, now=0.0)
    assert (idle.waiting, idle.running, idle.kv_usage_ratio) == (0, 0, 0.0)


def test_the_first_tokens_of_an_engine_already_have_a_tpot() -> None:
    meter = LoadMeter()
    meter.record_tokens([0.02, 0.04], now=100.0)
    assert meter.load(unfinished=2, now=100.1).tpot_s == pytest.approx(0.03)
    assert meter.load(unfinished=2, now=103.0).tpot_s is None


def test_the_meter_adds_up_engine_cores() -> None:
    meter = LoadMeter()
    meter.record_step(0, running=1, kv_usage_ratio=0.2)
    meter.record_step(1, running=2, kv_usage_ratio=0.4)
    load = meter.load(unfinished=3, now=0.1)
    assert load.running == 3
    assert load.kv_usage_ratio == pytest.approx(0.3)


def test_a_recorder_takes_steps_with_either_half_of_the_statistics() -> None:
    meter = LoadMeter()
    recorder = StepRecorder(meter, object(), 0)
    recorder.record(SimpleNamespace(num_running_reqs=2, kv_cache_usage=0.1), None, mm_cache_stats=None)
    recorder.record(None, SimpleNamespace(inter_token_latencies_iter=[0.5]), engine_idx=0)
    assert repr(meter) == "<LoadMeter running=2 token_gaps=1>"
