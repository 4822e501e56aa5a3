"""Inference engines: OpenAI-compatible servers, each hosted by one pool replica.

Read `engine` first: an engine is an ASGI app with a life cycle, limits and a load, and may be found to make
no progress.

- `emulated`: continuous batching without a GPU, on top of the pure `model`.
- `vllm`: vLLM's own server in this process.
- `adapters`: the metrics and limits that external servers expose; `serving.remote` watches those servers.
- `orphan_guard`: cleanup of engine processes whose parent has died.
"""
