"""One server of each kind under load, by its recorded pages; the documentation's table lists them."""

from tests.engines.adapters.pages import models, recorded

_TGI_INFO = {
    "model_id": "llama",
    "model_pipeline_tag": "text-generation",
    "max_concurrent_requests": 128,
    "max_input_tokens": 4095,
    "max_total_tokens": 4096,
    "docker_label": None,
    "version": "3.3.4",
}
_SGLANG_INFO = {
    "context_length": None,
    "max_running_requests": None,
    "dp_size": 2,
    "max_total_num_tokens": 20480,
    "internal_states": [{"effective_max_running_requests_per_dp": 64}] * 2,
    "version": "0.5.18",
}
_SGLANG_LOADS = {
    "timestamp": "2026-10-01T00:00:00",
    "dp_rank_count": 1,
    "loads": [
        {
            "dp_rank": 0,
            "num_running_reqs": 12,
            "num_waiting_reqs": 3,
            "token_usage": 0.5,
            "max_total_num_tokens": 20480,
        },
    ],
}
_LLAMA_CPP_PROPS = {
    "default_generation_settings": {"n_ctx": 4096, "params": {}},
    "total_slots": 4,
    "build_info": "b11434-0c1d2e3",
}
_LLAMA_CPP_MODELS = models("llama", owner="llamacpp", aliases=["llama", "small"], meta={"n_ctx": 4096})

# Page by path, for each name in the table.
SERVERS: dict[str, dict[str, object]] = {
    "vLLM": {
        "/v1/models": models("llama", owner="vllm", max_model_len=4096),
        "/metrics": recorded("vllm-0.32.0-busy.txt"),
        "/version": {"version": "0.32.0"},
    },
    "SGLang": {
        "/v1/models": models("llama", owner="sglang", max_model_len=4096),
        "/metrics": recorded("sglang-0.5.18-busy.txt"),
        "/server_info": _SGLANG_INFO,
    },
    "SGLang without `--enable-metrics`": {
        "/v1/models": models("llama", owner="sglang", max_model_len=4096),
        "/server_info": {**_SGLANG_INFO, "dp_size": 1},
        "/v1/loads?include=core": _SGLANG_LOADS,
    },
    "TensorRT-LLM (`trtllm-serve`)": {
        "/v1/models": models("llama", owner="tensorrt_llm"),
        "/prometheus/metrics": recorded("trtllm-serve-1.2-busy.txt"),
        "/metrics": [{"numActiveRequests": 31, "numQueuedRequests": 5}],
        "/version": {"version": "1.2.0"},
    },
    "Triton with TensorRT-LLM": {
        "/v1/models": models("llama", owner="Triton Inference Server"),
        "/metrics": recorded("triton-25.09-trtllm-busy.txt"),
    },
    "TGI": {
        "/v1/models": models("llama", owner="llama"),
        "/metrics": recorded("tgi-3.3-busy.txt"),
        "/info": _TGI_INFO,
    },
    "llama.cpp": {
        "/v1/models": _LLAMA_CPP_MODELS,
        "/metrics": recorded("llama.cpp-b11434-busy.txt"),
        "/props": _LLAMA_CPP_PROPS,
    },
    "llama.cpp without `--metrics`": {
        "/v1/models": _LLAMA_CPP_MODELS,
        "/metrics": 501,
        "/props": _LLAMA_CPP_PROPS,
        "/slots": b"["
        b'{"id":0,"is_processing":true,"n_ctx":4096},{"id":1,"is_processing":true,"n_ctx":4096},'
        b'{"id":2,"is_processing":true,"n_ctx":4096},{"id":3,"is_processing":false,"n_ctx":4096}]',
    },
    "Dynamo": {
        "/v1/models": models("llama", owner="nvidia", context_window=4096),
        "/metrics": recorded("dynamo-documented.txt"),
    },
    "Ollama": {
        "/v1/models": models("llama:latest", owner="library"),
        "/api/version": {"version": "0.15.0"},
        "/api/ps": {"models": [{"name": "llama:latest", "context_length": 4096, "size_vram": 1}]},
    },
    "any other": {"/v1/models": models("llama", owner="me")},
}
