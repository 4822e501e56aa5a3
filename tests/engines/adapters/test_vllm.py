import asyncio

import pytest

from serve_app.engines.adapters import identify
from serve_app.engines.adapters.vllm import kv_capacity_tokens, read
from serve_app.errors import EngineError
from tests.engines.adapters.pages import models, recorded, server

IDLE, BUSY = recorded("vllm-0.32.0-idle.txt"), recorded("vllm-0.32.0-busy.txt")
OLD_NAMES = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 7.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:time_per_output_token_seconds_sum{model_name="m"} 12.5
vllm:time_per_output_token_seconds_count{model_name="m"} 500.0
"""
LISTED = {"data": [
    {"id": "sql", "owned_by": "vllm", "parent": "llama"},
    {"id": "llama", "owned_by": "vllm", "max_model_len": 4096, "parent": None},
]}  # fmt: skip


def test_an_idle_server_of_vllm_0_32_is_read() -> None:
    reading = read(IDLE)
    assert (reading.running, reading.waiting, reading.kv_usage_ratio) == (0, 0, 0.0)
    assert reading.token_gaps
    assert reading.token_gaps_s
    assert 0.001 < reading.token_gaps_s / reading.token_gaps < 1.0


def test_a_busy_server_of_vllm_0_32_is_read() -> None:
    # Recorded with max_num_seqs 16, while 20 streams were open.
    reading = read(BUSY)
    assert (reading.running, reading.waiting) == (16, 4)
    assert reading.kv_usage_ratio is not None
    assert 0 < reading.kv_usage_ratio < 1


def test_the_names_of_older_releases_are_understood() -> None:
    reading = read(OLD_NAMES)
    assert (reading.running, reading.waiting, reading.kv_usage_ratio) == (3, 7, 0.25)
    assert (reading.token_gaps, reading.token_gaps_s) == (500, 12.5)
    assert reading.kv_tokens is None


def test_engine_cores_are_added_up_and_their_cache_usage_averaged() -> None:
    cache = 'block_size="16",kv_cache_size_tokens="1600",num_gpu_blocks="200"'
    cores = [
        'vllm:num_requests_running{engine="0"} 2.0',
        'vllm:num_requests_running{engine="1"} 5.0',
        'vllm:num_requests_waiting{engine="0"} 0.0',
        'vllm:num_requests_waiting{engine="1"} 1.0',
        'vllm:kv_cache_usage_perc{engine="0"} 0.2',
        'vllm:kv_cache_usage_perc{engine="1"} 0.6',
        # Blocks are those of both cores together; the size in tokens is that of one core.
        f'vllm:cache_config_info{{engine="0",{cache}}} 1.0',
        f'vllm:cache_config_info{{engine="1",{cache}}} 1.0',
    ]
    reading = read("\n".join(cores).encode())
    assert (reading.running, reading.waiting) == (7, 1)
    assert reading.kv_usage_ratio == pytest.approx(0.4)
    assert reading.kv_tokens == 2 * 99 * 16


@pytest.mark.parametrize("text", [b"", b"<html>not found</html>", b"vllm:num_requests_running 1.0"])
def test_text_that_is_not_from_vllm_is_rejected(text: bytes) -> None:
    with pytest.raises(EngineError, match="is it a vLLM server"):
        read(text)


@pytest.mark.parametrize(
    ("size_tokens", "num_blocks", "cores", "expected"),
    [(None, 100, 1, 99 * 16), (1600, 100, 1, 99 * 16), (800, 100, 2, 98 * 16), (None, 0, 1, 0)],
)
def test_each_core_sets_one_block_aside(
    size_tokens: int | None, num_blocks: int, cores: int, expected: int
) -> None:
    assert kv_capacity_tokens(size_tokens, num_blocks, 16, cores) == expected


def test_vllm_is_identified_by_its_metrics_and_reports_all_but_its_batch_size() -> None:
    get = server({"/v1/models": LISTED, "/metrics": BUSY, "/version": {"version": "0.32.0"}})
    found = asyncio.run(identify(get))
    assert (found.kind, found.version, found.metrics_path) == ("vLLM", "0.32.0", "/metrics")
    assert [(listing.model, listing.base) for listing in found.models] == [("llama", None), ("sql", "llama")]
    assert (found.limits.max_model_len, found.limits.kv_tokens) == (4096, 524_160)
    assert found.limits.max_num_seqs is None
    assert [lack.partition(":")[0] for lack in found.limitations] == ["maximum batch size (max_num_seqs)"]
    assert found.read(BUSY).waiting == 4


def test_vllm_without_statistics_is_known_by_its_models_and_has_no_load() -> None:
    get = server({"/v1/models": models("m", owner="vllm"), "/metrics": b"# TYPE up gauge\nup 1\n"})
    found = asyncio.run(identify(get))
    assert (found.kind, found.metrics_path) == ("vLLM", None)
    assert len(found.limitations) == 7


def test_the_progress_of_a_server_shows_in_its_iterations_and_its_cache() -> None:
    before = read(BUSY)
    assert before.steps is not None
    assert before.progress == read(BUSY).progress
    for name in (b"vllm:iteration_tokens_total_count{", b"vllm:kv_cache_usage_perc{"):
        line = next(line for line in BUSY.splitlines() if line.startswith(name))
        changed = BUSY.replace(line, line.rpartition(b" ")[0] + b" 0.75")
        assert read(changed).progress != before.progress
    assert read(OLD_NAMES).progress is None
