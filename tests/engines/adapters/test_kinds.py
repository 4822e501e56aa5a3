"""Load and limits of each kind of server, read from its recorded pages."""

import asyncio
from collections.abc import Mapping

import pytest

from serve_app.engines.adapters import (
    EngineReading,
    EngineServer,
    ReportedLimits,
    dynamo,
    identify,
    llama_cpp,
    sglang,
    tensorrt_llm,
)
from serve_app.errors import EngineError
from tests.engines.adapters.pages import models, page_of, recorded, server
from tests.engines.adapters.recorded_servers import SERVERS


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


def test_sglang_without_reported_load_has_none() -> None:
    found = described({"/v1/models": models("m", owner="sglang")})
    assert (found.metrics_path, found.read(b"")) == (None, EngineReading())


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
