"""The gateway's data plane: a plain ASGI application between OpenAI clients and replicas.

It parses just enough of a request to have it scheduled, sends the raw body to the granted replica's own port
and passes the raw answer back. Read `app` (routes), `request.reader` (a body becomes a submission and a job),
`forward` (the life of a job), then `upstream` (HTTP to a replica), `answer` (what passes on the way back) and
`listener` (the gateway's own port).
"""

from serve_app.serving.gateway.app import Gateway
from serve_app.serving.gateway.keys import ApiKey
from serve_app.serving.gateway.settings import GatewaySettings, ServedModel
from serve_app.serving.gateway.upstream import UpstreamSettings

__all__ = ["ApiKey", "Gateway", "GatewaySettings", "ServedModel", "UpstreamSettings"]
