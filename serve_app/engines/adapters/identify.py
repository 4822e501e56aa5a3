"""Identification of the server at an address.

Most servers name themselves as the owner in their model list. The others are identified by the names of their
metrics or, if metrics are disabled, by a page that only this server has.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from serve_app.engines.adapters import dynamo, llama_cpp, others, sglang, tensorrt_llm, vllm
from serve_app.engines.adapters.server import ControlPages, EngineReading, EngineServer, Get

_Describe = Callable[[ControlPages], Awaitable[EngineServer]]

_BY_METRICS: tuple[tuple[bytes, _Describe], ...] = (
    # Before the engines behind it, whose metrics may be on the same page.
    (b"\n" + dynamo.FRONTEND, dynamo.describe),
    (vllm.RUNNING, vllm.describe),
    *((name, sglang.describe) for name in sglang.RUNNING),
    (llama_cpp.RUNNING, llama_cpp.describe),
    (b"\n" + others.TGI_PREFIX, others.describe_tgi),
    (tensorrt_llm.TRITON_REQUESTS, tensorrt_llm.describe_triton),
    (tensorrt_llm.TRITON, tensorrt_llm.describe_triton),
)
_BY_OWNER: dict[str, _Describe] = {
    "vllm": vllm.describe,
    "sglang": sglang.describe,
    "tensorrt_llm": tensorrt_llm.describe,
    llama_cpp.OWNER: llama_cpp.describe,
}


async def identify(get: Get) -> EngineServer:
    """Identify the server and return its models, limits and load reader.

    Args:
        get: fetches a control page, with the server's API key if it requires one.

    Raises:
        EngineError: the server does not answer, rejects the key, or has no model list.
    """
    pages = ControlPages(get)
    describe = await _adapter(pages)
    server = await describe(pages)
    path, limits = server.metrics_path, server.limits
    reading = server.read(await pages.text(path)) if path else EngineReading()
    limits = replace(
        limits,
        # The load is summed over all engines; what an adapter returns may be derived from one of them.
        kv_tokens=reading.kv_tokens or limits.kv_tokens,
        max_num_seqs=limits.max_num_seqs or reading.max_num_seqs,
    )
    return replace(server, models=await pages.models(), limits=limits, reading=reading)


async def _adapter(pages: ControlPages) -> _Describe:
    entries = await pages.raw_models()
    owners = {str(entry.get("owned_by")) for entry in entries}
    for owner in sorted(owners & _BY_OWNER.keys()):
        return _BY_OWNER[owner]
    metrics = await pages.text("/metrics")
    for name, describe in _BY_METRICS:
        if name in metrics:
            return describe
    if others.OLLAMA_OWNER in owners and await others.is_ollama(pages):
        return others.describe_ollama
    # TGI reports the model name as its owner.
    if owners == {str(entry["id"]) for entry in entries} and await others.is_tgi(pages):
        return others.describe_tgi
    return others.describe_unknown
