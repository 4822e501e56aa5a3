"""The gateway's data plane: an HTTP application between OpenAI clients and replicas.

It parses only what scheduling needs, sends the raw body to the granted replica's own port and passes the raw
answer back. Reading order: `app` (routes), `request.reader` (from body to submission), `path` (the states of
a request), `upstream` (HTTP to a replica), `answer` (the way back), `deployment` (the gateway's own port).
"""

from serve_app.serving.gateway.app import Gateway
from serve_app.serving.gateway.keys import ApiKey
from serve_app.serving.gateway.settings import GatewaySettings, ServedModel
from serve_app.serving.gateway.upstream import UpstreamSettings

__all__ = ["ApiKey", "Gateway", "GatewaySettings", "ServedModel", "UpstreamSettings"]
