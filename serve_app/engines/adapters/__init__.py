"""Adapters for external LLM servers: identification, model list, limits and load.

Read `server` first: it describes a server and its control pages. `identify` chooses the adapter. There is one
module per server; `others` has those that expose few metrics. `rejections` parses errors about too long
requests. `samples` extracts single samples from a metrics page without parsing the rest, because the page is
scraped five times per second.

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
