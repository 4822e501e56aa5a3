"""Adapters to servers of language models: which one it is, what it serves, its limits, its load.

Read `server` first: the description of a server, its control pages, and the reading of its load. `identify`
chooses the adapter. There is one module per kind, and `others` for those with little to tell. `samples` finds
single samples in a page of metrics without parsing the rest, since it is read five times a second.

Nothing here opens a connection: the watcher of a server passes a function that gets a page.
"""

from serve_app.engines.adapters.identify import identify
from serve_app.engines.adapters.server import (
    EngineReading,
    EngineServer,
    Get,
    ModelListing,
    PageAnswer,
    StatedLimits,
)

__all__ = ["EngineReading", "EngineServer", "Get", "ModelListing", "PageAnswer", "StatedLimits", "identify"]
