from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.engines.vllm_metrics import (
    LoadMeter,
    StepRecorder,
    kv_capacity_tokens,
    read_metrics,
)
from serve_app.errors import EngineError

RECORDED = Path(__file__).parent / "recorded"
OLD_NAMES = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 7.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:time_per_output_token_seconds_sum{model_name="m"} 12.5
vllm:time_per_output_token_seconds_count{model_name="m"} 500.0
"""


def test_an_idle_server_of_vllm_0_32_is_read() -> None:
    metrics = read_metrics((RECORDED / "vllm-0.32.0-idle.txt").read_text())
    assert (metrics.running, metrics.waiting, metrics.kv_usage_ratio) == (0, 0, 0.0)
    assert metrics.token_gaps > 0
    assert 0.001 < metrics.token_gaps_s / metrics.token_gaps < 1.0


def test_a_busy_server_of_vllm_0_32_is_read() -> None:
    # Recorded with max_num_seqs 16, while 20 streams were open.
    metrics = read_metrics((RECORDED / "vllm-0.32.0-busy.txt").read_text())
    assert (metrics.running, metrics.waiting) == (16, 4)
    assert 0 < metrics.kv_usage_ratio < 1


def test_the_progress_of_a_server_shows_in_its_iterations_and_its_cache() -> None:
    page = (RECORDED / "vllm-0.32.0-busy.txt").read_text()
    before = read_metrics(page)
    assert before.steps is not None
    assert before.progress == read_metrics(page).progress
    for name in ("vllm:iteration_tokens_total_count{", "vllm:kv_cache_usage_perc{"):
        line = next(line for line in page.splitlines() if line.startswith(name))
        changed = page.replace(line, f"{line.rpartition(' ')[0]} 0.75")
        assert read_metrics(changed).progress != before.progress
    assert read_metrics(OLD_NAMES).progress is None


def test_the_capacity_of_the_kv_cache_leaves_out_the_block_that_vllm_never_fills() -> None:
    # 4,096 blocks of 128 tokens.
    metrics = read_metrics((RECORDED / "vllm-0.32.0-idle.txt").read_text())
    assert metrics.kv_tokens == 4_095 * 128


def test_the_names_of_older_releases_are_understood() -> None:
    metrics = read_metrics(OLD_NAMES)
    assert (metrics.running, metrics.waiting, metrics.kv_usage_ratio) == (3, 7, 0.25)
    assert (metrics.token_gaps, metrics.token_gaps_s) == (500, 12.5)
    assert metrics.kv_tokens is None


def test_engine_cores_are_added_up_and_their_cache_usage_averaged() -> None:
    cache = 'block_size="16",kv_cache_size_tokens="1600",num_gpu_blocks="200"'
    cores = [
        'vllm:num_requests_running{engine="0"} 2.0',
        'vllm:num_requests_running{engine="1"} 5.0',
        'vllm:num_requests_waiting{engine="0"} 0.0',
        'vllm:num_requests_waiting{engine="1"} 1.0',
        'vllm:kv_cache_usage_perc{engine="0"} 0.2',
        'vllm:kv_cache_usage_perc{engine="1"} 0.6',
        # Blocks are those of both cores together, the size in tokens is that of one.
        f'vllm:cache_config_info{{engine="0",{cache}}} 1.0',
        f'vllm:cache_config_info{{engine="1",{cache}}} 1.0',
    ]
    metrics = read_metrics("\n".join(cores))
    assert (metrics.running, metrics.waiting) == (7, 1)
    assert metrics.kv_usage_ratio == pytest.approx(0.4)
    assert metrics.kv_tokens == 2 * 99 * 16


@pytest.mark.parametrize("text", ["", "<html>not found</html>", "vllm:num_requests_running 1.0"])
def test_text_that_is_not_from_vllm_is_refused(text: str) -> None:
    with pytest.raises(EngineError, match="is it a vLLM server"):
        read_metrics(text)


def test_a_line_without_a_number_is_refused_and_shown() -> None:
    with pytest.raises(EngineError, match="num_requests_running is fine"):
        read_metrics("vllm:num_requests_running is fine")


@pytest.mark.parametrize(
    ("size_tokens", "num_blocks", "cores", "expected"),
    [(None, 100, 1, 99 * 16), (1600, 100, 1, 99 * 16), (800, 100, 2, 98 * 16), (None, 0, 1, 0)],
)
def test_each_core_sets_one_block_aside(
    size_tokens: int | None, num_blocks: int, cores: int, expected: int
) -> None:
    assert kv_capacity_tokens(size_tokens, num_blocks, 16, cores) == expected


def test_the_meter_counts_what_the_core_has_not_seen_as_waiting() -> None:
    meter = LoadMeter()
    meter.on_step(0, running=4, kv_usage_ratio=0.5)
    load = meter.load(unfinished=6, now=0.0)
    assert (load.waiting, load.running, load.kv_usage_ratio) == (2, 4, 0.5)


def test_aborted_requests_run_no_more_though_the_last_step_had_them() -> None:
    meter = LoadMeter()
    meter.on_step(0, running=4, kv_usage_ratio=0.5)
    assert meter.load(unfinished=1, now=0.0).running == 1
    idle = meter.load(unfinished=0, now=0.0)
    assert (idle.waiting, idle.running, idle.kv_usage_ratio) == (0, 0, 0.0)


def test_the_first_tokens_of_an_engine_already_have_a_tpot() -> None:
    meter = LoadMeter()
    meter.on_tokens([0.02, 0.04], now=100.0)
    assert meter.load(unfinished=2, now=100.1).tpot_s == pytest.approx(0.03)
    assert meter.load(unfinished=2, now=103.0).tpot_s is None


def test_the_meter_adds_up_engine_cores() -> None:
    meter = LoadMeter()
    meter.on_step(0, running=1, kv_usage_ratio=0.2)
    meter.on_step(1, running=2, kv_usage_ratio=0.4)
    load = meter.load(unfinished=3, now=0.1)
    assert load.running == 3
    assert load.kv_usage_ratio == pytest.approx(0.3)


def test_a_recorder_takes_steps_with_either_half_of_the_statistics() -> None:
    meter = LoadMeter()
    recorder = StepRecorder(meter, object(), 0)
    recorder.record(SimpleNamespace(num_running_reqs=2, kv_cache_usage=0.1), None, mm_cache_stats=None)
    recorder.record(None, SimpleNamespace(inter_token_latencies_iter=[0.5]), engine_idx=0)
    assert repr(meter) == "<LoadMeter running=2 token_gaps=1>"
