"""Adapters to servers of language models: which one it is, what it serves, its limits, its load.

Read `server` first: what is known of a server, and the reading of its load. `identify` asks the control
pages of a server and chooses the adapter; there is one module per kind. `samples` finds single samples in
a page of metrics without parsing the rest, since it is read five times a second.

Nothing here opens a connection: who watches a server gives a function that gets a page.
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
