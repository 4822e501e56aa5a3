"""Engines: what answers the OpenAI API behind one pool replica.

Read `engine` first: an engine is an ASGI app with a life cycle, limits and a load. Then the engine you need:

- `emulated`: continuous batching without a GPU, over the pure `serve_app.engines.model`;
- `vllm`: vLLM's own server in this process.

Servers that run elsewhere are no engines of ours: `serving.remote` watches them.

They share `asgi` (reading and answering HTTP), `adapters` (what servers tell of themselves) and
`orphan_guard` (no engine process outlives its parent).
"""
