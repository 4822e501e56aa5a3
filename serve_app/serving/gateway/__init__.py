"""The gateway's data plane: a plain ASGI application between OpenAI clients and replicas.

It parses just enough of a request to have it scheduled, sends the raw body to the granted replica's own
port and passes the raw answer back. Read `app.py` (routes), `intake.py` (a request becomes an order),
`forward.py` (the life of an order), then `upstream.py` (HTTP to a replica), `sse.py` and `splice.py` (what
is done to the bytes).
"""

from serve_app.serving.gateway.app import Gateway
from serve_app.serving.gateway.auth import ApiKey
from serve_app.serving.gateway.settings import GatewaySettings, ServedModel
from serve_app.serving.gateway.upstream.pool import UpstreamSettings

__all__ = ["ApiKey", "Gateway", "GatewaySettings", "ServedModel", "UpstreamSettings"]
