"""The gateway's data plane: an HTTP application between OpenAI clients and replicas.

It parses only what scheduling needs, sends the raw body to the granted replica's own port and passes the raw
answer back. In reading order:

- `app`, `router`: the application, its routes, and calls from web pages.
- `request`: from a body to a submission.
- `path`: the states of a request.
- `upstream`: HTTP to a replica.
- `answer`: the way back; `stored`: requests that refer to an earlier response.
- `models`, `keys`, `logins`, `settings`: requested names, authentication by keys and by tokens, budgets, and
  all settings.
- `telemetry`, `request_log`, `tracing`, `metrics_page`: metrics, log lines and traces of requests, and
  `/metrics`.
- `admin`, `dashboard`, `batches`: endpoints of admins, the dashboard, and the Batch API.
- `deployment`: the gateway's own port, and its deployment on Ray Serve.
"""

from serve_app.serving.gateway.app import Gateway
from serve_app.serving.gateway.keys import ApiKey
from serve_app.serving.gateway.settings import GatewaySettings, ServedModel
from serve_app.serving.gateway.upstream import UpstreamSettings

__all__ = ["ApiKey", "Gateway", "GatewaySettings", "ServedModel", "UpstreamSettings"]
