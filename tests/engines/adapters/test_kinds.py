"""Kinds of servers: identified by their control pages, with the load and limits of the recorded ones."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from serve_app.engines.adapters import (
    EngineReading,
    EngineServer,
    PageResponse,
    ReportedLimits,
    dynamo,
    identify,
    llama_cpp,
    sglang,
    tensorrt_llm,
)
from serve_app.engines.adapters.vllm import SELECTED_METRICS, kv_capacity_tokens, read
from serve_app.errors import EngineError
from tests.engines.adapters.pages import models, page_of, recorded, server
from tests.engines.adapters.recorded_servers import SERVERS


def test_an_unknown_server_is_served_by_its_list_of_models() -> None:
    found = asyncio.run(identify(server({"/v1/models": models("m", owner="me", max_model_len=2048)})))
    assert (found.kind, found.limits.max_model_len) == ("OpenAI-compatible", 2048)
    assert (found.metrics_path, found.health_path) == (None, "/v1/models")
    assert found.read(b"anything").waiting is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"context_window": 2048}, 2048),
        ({"context_length": 2048}, 2048),
        ({"max_context_length": 2048}, 2048),
        ({"meta": {"n_ctx": 2048, "n_ctx_train": 131_072}}, 2048),
        ({"max_model_len": 2048, "context_length": 4096}, 2048),
        ({"context_window": 0}, None),
        ({"meta": {"n_ctx_train": 131_072}}, None),
        ({"context_length": "2048"}, None),
    ],
)
def test_the_context_has_several_names_in_model_lists(
    fields: dict[str, object], expected: int | None
) -> None:
    found = asyncio.run(identify(server({"/v1/models": models("m", owner="me", **fields)})))
    assert found.limits.max_model_len == expected


def test_a_list_with_several_contexts_states_none_of_them() -> None:
    entries = [{"id": "a", "context_length": 4096}, {"id": "b", "context_length": 8192}]
    found = asyncio.run(identify(server({"/v1/models": {"data": entries}})))
    assert found.limits.max_model_len is None


def test_no_page_is_requested_twice() -> None:
    log: list[str] = []
    pages = {"/v1/models": models("m", owner="vllm"), "/metrics": recorded("vllm-0.32.0-idle.txt")}
    asyncio.run(identify(server(pages, log=log)))
    assert sorted(log) == sorted(set(log))


def test_a_rejected_key_is_named() -> None:
    with pytest.raises(EngineError, match=r"/v1/models returned 401: set api_key to the server's key"):
        asyncio.run(identify(server({"/v1/models": 401})))


@pytest.mark.parametrize("page", [b"<html>", {"data": [{"name": "m"}]}, {"data": None}, []])
def test_an_invalid_model_list_is_shown(page: object) -> None:
    with pytest.raises(EngineError, match=r"/v1/models is not a list of models, .*: correct the URL"):
        asyncio.run(identify(server({"/v1/models": page})))


def test_a_server_without_a_list_of_models_is_no_server() -> None:
    with pytest.raises(EngineError, match="/v1/models returned 404"):
        asyncio.run(identify(server({})))


def test_silence_is_passed_on() -> None:
    async def silent(path: str) -> PageResponse:
        raise EngineError(f"{path}: nothing answers")

    with pytest.raises(EngineError, match="nothing answers"):
        asyncio.run(identify(silent))


# -- load and limits by kind ------------------------------------------------------------------------------


def described(pages: Mapping[str, object]) -> EngineServer:
    return asyncio.run(identify(server(pages)))


def load_of(name: str) -> EngineReading:
    found = described(SERVERS[name])
    assert found.metrics_path is not None
    return found.read(page_of(SERVERS[name], found.metrics_path))


@pytest.mark.parametrize(
    ("name", "kind", "version"),
    [
        ("vLLM", "vLLM", "0.32.0"),
        ("SGLang", "SGLang", "0.5.18"),
        ("SGLang without `--enable-metrics`", "SGLang", "0.5.18"),
        ("TensorRT-LLM (`trtllm-serve`)", "TensorRT-LLM", "1.2.0"),
        ("Triton with TensorRT-LLM", "Triton", None),
        ("TGI", "TGI", "3.3.4"),
        ("llama.cpp", "llama.cpp", "b11434-0c1d2e3"),
        ("llama.cpp without `--metrics`", "llama.cpp", "b11434-0c1d2e3"),
        ("Dynamo", "Dynamo", None),
        ("Ollama", "Ollama", "0.15.0"),
        ("any other", "OpenAI-compatible", None),
    ],
)
def test_a_server_is_known_by_its_pages(name: str, kind: str, version: str | None) -> None:
    found = described(SERVERS[name])
    assert (found.kind, found.version) == (kind, version)
    assert found.models[0].model.startswith("llama")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "SGLang",
            EngineReading(
                waiting=3,
                running=21,
                kv_usage_ratio=0.375,
                kv_tokens=40_960,
                token_gaps=2400,
                token_gaps_s=96.0,
            ),
        ),
        (
            "SGLang without `--enable-metrics`",
            EngineReading(waiting=3, running=12, kv_usage_ratio=0.5, kv_tokens=20_480),
        ),
        (
            "TensorRT-LLM (`trtllm-serve`)",
            EngineReading(
                waiting=5,
                running=31,
                kv_usage_ratio=0.4,
                kv_tokens=32_000,
                max_num_seqs=64,
                token_gaps=50,
                token_gaps_s=1.0,
            ),
        ),
        (
            "Triton with TensorRT-LLM",
            EngineReading(waiting=7, running=16, kv_usage_ratio=0.625, kv_tokens=51_200, max_num_seqs=512),
        ),
        ("TGI", EngineReading(waiting=4, running=8, token_gaps=50, token_gaps_s=1.5)),
        ("llama.cpp", EngineReading(waiting=2, running=4, token_gaps=500, token_gaps_s=25.0)),
        ("llama.cpp without `--metrics`", EngineReading(running=3, max_num_seqs=4)),
        ("Dynamo", EngineReading(kv_tokens=120_000, max_num_seqs=128, token_gaps=400, token_gaps_s=8.0)),
    ],
)
def test_the_load_is_read_from_its_page(name: str, expected: EngineReading) -> None:
    assert load_of(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SGLang", ReportedLimits(max_model_len=4096, kv_tokens=40_960, max_num_seqs=128)),
        ("TensorRT-LLM (`trtllm-serve`)", ReportedLimits(kv_tokens=32_000, max_num_seqs=64)),
        ("TGI", ReportedLimits(max_model_len=4096)),
        ("llama.cpp", ReportedLimits(max_model_len=4096, max_num_seqs=4)),
        ("Dynamo", ReportedLimits(max_model_len=4096, kv_tokens=120_000, max_num_seqs=128)),
        ("Ollama", ReportedLimits(max_model_len=4096)),
        ("any other", ReportedLimits()),
    ],
)
def test_the_limits_are_those_that_it_states(name: str, expected: ReportedLimits) -> None:
    assert described(SERVERS[name]).limits == expected


def test_the_statistics_that_trtllm_hands_out_once_are_left_to_their_reader() -> None:
    paths: list[str] = []
    asyncio.run(identify(server(SERVERS["TensorRT-LLM (`trtllm-serve`)"], log=paths)))
    assert "/metrics" not in paths


def test_sglang_names_with_an_underscore_are_read_as_well() -> None:
    page = recorded("sglang-0.5.18-busy.txt").replace(b"sglang:", b"sglang_")
    found = described({**SERVERS["SGLang"], "/metrics": page})
    assert found.read(page).running == 21


def test_sglang_before_its_newer_pages_is_read_from_the_older_ones() -> None:
    loads = [{"dp_rank": 0, "num_reqs": 15, "num_waiting_reqs": 3, "num_tokens": 900}]
    info = {"max_running_requests": 48, "max_total_num_tokens": 9_000, "version": "0.5.2"}
    old = {
        "/v1/models": models("m", owner="sglang", max_model_len=512),
        "/get_server_info": info,
        "/get_load": loads,
    }
    found = described(old)
    assert found.limits == ReportedLimits(max_model_len=512, kv_tokens=9_000, max_num_seqs=48)
    assert found.metrics_path == "/get_load"
    assert sglang.read_loads(b'[{"num_reqs": 15, "num_waiting_reqs": 3}]') == EngineReading(
        waiting=3, running=12
    )


def test_the_capacity_in_the_load_and_the_batch_in_effect_precede_the_arguments_of_sglang() -> None:
    pages = SERVERS["SGLang"]
    states = [{"effective_max_running_requests_per_dp": 24}] * 2
    info = {"max_total_num_tokens": 1, "max_running_requests": 512, "dp_size": 2, "internal_states": states}
    found = described({**pages, "/server_info": info})
    assert found.limits == ReportedLimits(max_model_len=4096, kv_tokens=40_960, max_num_seqs=48)


def test_sglang_without_reported_load_has_none() -> None:
    found = described({"/v1/models": models("m", owner="sglang")})
    assert (found.metrics_path, found.reading) == (None, EngineReading())


def test_tgi_before_its_first_request_is_idle() -> None:
    pages = {**SERVERS["TGI"], "/metrics": b""}
    found = described(pages)
    assert found.kind == "TGI"
    assert found.read(b"") == EngineReading(waiting=0, running=0, token_gaps=0, token_gaps_s=0.0)


def test_tgi_before_3_states_its_cache() -> None:
    info = {"max_batch_total_tokens": 16_384, "max_batch_size": 32}
    pages = {**SERVERS["TGI"], "/info": {**SERVERS["TGI"]["/info"], **info}}  # type: ignore[dict-item]
    assert described(pages).limits == ReportedLimits(max_model_len=4096, kv_tokens=16_384, max_num_seqs=32)


def test_trtllm_before_its_first_request_reports_nothing_yet() -> None:
    assert tensorrt_llm.read(b"") == EngineReading()
    assert tensorrt_llm.read(b"# HELP trtllm_num_requests_waiting Number\n") == EngineReading()


def test_triton_without_tensorrt_llm_has_no_load() -> None:
    page = b"# TYPE nv_inference_request_success counter\nnv_inference_request_success{} 4\n"
    found = described({"/v1/models": models("m", owner="Triton Inference Server"), "/metrics": page})
    assert (found.kind, found.metrics_path) == ("Triton", None)


def test_older_triton_counts_active_unscheduled_requests_as_waiting() -> None:
    page = b"\n".join(
        line for line in recorded("triton-25.09-trtllm-busy.txt").splitlines() if b'"waiting"' not in line
    )
    assert tensorrt_llm.read_triton(page).waiting == 7


def without(page: bytes, name: bytes) -> bytes:
    return b"\n".join(line for line in page.splitlines() if name not in line)


def test_dynamo_states_the_limits_of_one_worker() -> None:
    page = page_of(SERVERS["Dynamo"], "/metrics")
    stated = b"# TYPE dynamo_frontend_model_workers gauge\ndynamo_frontend_model_workers{} 3\n"
    assert dynamo.read(page + stated).kv_tokens == 3 * 60_000
    # Without a number of workers it is one.
    alone = dynamo.read(without(page, b"worker_active"))
    assert (alone.kv_tokens, alone.max_num_seqs) == (60_000, 64)


def test_dynamo_before_its_first_worker_states_nothing() -> None:
    page = without(page_of(SERVERS["Dynamo"], "/metrics"), b"_model_")
    found = described({"/v1/models": models("m", owner="nvidia", context_window=0), "/metrics": page})
    assert found.limits == ReportedLimits()


def test_dynamo_with_models_of_different_limits_states_none_of_them() -> None:
    page = page_of(SERVERS["Dynamo"], "/metrics")
    line = b'dynamo_frontend_model_max_num_seqs{model="llama"} 64\n'
    several = page.replace(line, line + line.replace(b"llama", b"other").replace(b"64", b"32"))
    assert dynamo.read(several).max_num_seqs is None


def test_the_context_of_dynamo_is_in_its_metrics_too() -> None:
    pages = {**SERVERS["Dynamo"], "/v1/models": models("llama", owner="nvidia", context_window=0)}
    assert described(pages).limits.max_model_len == 8192


def test_llama_cpp_is_served_by_its_aliases_too() -> None:
    assert [each.model for each in described(SERVERS["llama.cpp"]).models] == ["llama", "small"]


def test_llama_cpp_of_2025_reports_the_use_of_its_cache() -> None:
    page = recorded("llama.cpp-b11434-busy.txt") + b"# x\nllamacpp:kv_cache_usage_ratio 0.5\n"
    assert llama_cpp.read_metrics(page).kv_usage_ratio == 0.5


def test_another_owner_of_a_library_is_not_ollama() -> None:
    assert described({"/v1/models": models("m", owner="library")}).kind == "OpenAI-compatible"


@pytest.mark.parametrize(
    ("read", "page"),
    [
        (lambda page: sglang.read_metrics(page, b"sglang:"), b"vllm:num_requests_running 1\n"),
        (sglang.read_loads, b"<html>"),
        (sglang.read_loads, b"[]"),
        (sglang.read_loads, b'{"loads": 3}'),
        (tensorrt_llm.read, b"nothing 1\n"),
        (tensorrt_llm.read_triton, b"nothing 1\n"),
        (dynamo.read, b"nothing 1\n"),
        (llama_cpp.read_metrics, b"nothing 1\n"),
        (llama_cpp.read_slots, b'{"error": {}}'),
    ],
)
def test_the_page_of_another_server_is_rejected(read: object, page: bytes) -> None:
    with pytest.raises(EngineError):
        read(page)  # type: ignore[operator]


# -- vLLM -------------------------------------------------------------------------------------------------

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


def test_vllm_collects_only_the_metrics_that_are_read_if_it_can_select_them() -> None:
    get = server({"/v1/models": LISTED, "/metrics": BUSY, SELECTED_METRICS: BUSY})
    assert asyncio.run(identify(get)).metrics_path == SELECTED_METRICS
    # The files of several API servers give an empty page.
    get = server({"/v1/models": LISTED, "/metrics": BUSY, SELECTED_METRICS: b""})
    assert asyncio.run(identify(get)).metrics_path == "/metrics"


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


# -- the documentation's tables of servers, cell by cell --------------------------------------------------

DOCUMENT = Path(__file__).parents[3] / "docs" / "servers.md"
LOAD = "| server | queue | batch | KV use | time per token | page |"
LIMITS = "| server | context | KV size | batch limit |"


def documented(header: str) -> list[str]:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows = lines[lines.index(header) + 2 :]
    return list(takewhile(lambda line: line.startswith("|"), rows))


def found(name: str) -> tuple[str, str]:
    """Return one server's rows of load and limits as its adapter reads them."""
    described = asyncio.run(identify(server(SERVERS[name])))
    path = described.metrics_path
    reading = described.read(page_of(SERVERS[name], path)) if path else EngineReading()
    limits = described.limits
    # A metrics page may also state a limit.
    limits = replace(limits, kv_tokens=limits.kv_tokens or reading.kv_tokens)
    load = _row(name, reading.waiting, reading.running, reading.kv_usage_ratio, reading.token_gaps)
    return (
        f"{load} {f'`{path}`' if path else 'none'} |",
        _row(name, limits.max_model_len, limits.kv_tokens, limits.max_num_seqs),
    )


def _row(name: str, *cells: object) -> str:
    return f"| {name} | {' | '.join('no' if cell is None else 'yes' for cell in cells)} |"


def test_the_tables_say_what_the_adapters_find() -> None:
    rows = [found(name) for name in SERVERS]
    assert documented(LOAD) == [load for load, _ in rows]
    assert documented(LIMITS) == [limits for _, limits in rows]


def test_missing_values_are_a_no_in_the_tables() -> None:
    for name in SERVERS:
        described = asyncio.run(identify(server(SERVERS[name])))
        assert len(described.limitations) == " ".join(found(name)).count("| no "), name
