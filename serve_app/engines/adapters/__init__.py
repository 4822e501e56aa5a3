"""Adapters for external LLM servers: identification, model list, limits and load.

Read `server` first: it describes a server and its control pages, reads samples of a metrics page without
parsing the rest, because the page is scraped five times per second, and reads errors about too long requests.
Then `vllm`, as an example of a server. `identify` chooses the adapter. The others are `sglang`,
`tensorrt_llm` (with Triton), `llama_cpp` and `dynamo`; `others` has TGI, Ollama and unknown servers.

No adapter opens a connection: the watcher of a server passes a function that fetches a page.
"""

from serve_app.engines.adapters.identify import identify
from serve_app.engines.adapters.server import (
    EngineReading,
    EngineServer,
    Get,
    ModelListing,
    PageResponse,
    ReportedLimits,
)

__all__ = [
    "EngineReading",
    "EngineServer",
    "Get",
    "ModelListing",
    "PageResponse",
    "ReportedLimits",
    "identify",
]
