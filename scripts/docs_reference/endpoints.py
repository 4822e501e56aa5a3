"""Reference of endpoints: paths of the gateway, and the treatment of their requests."""

from unittest.mock import Mock

from docs_reference.markdown import code, document, table
from serve_app.serving.gateway import Gateway, GatewaySettings, ServedModel
from serve_app.serving.gateway.answer.responses import ANTHROPIC, ClientApi
from serve_app.serving.gateway.request.endpoints import FORMS, QUERY_ROUTES, SCHEDULED, UNSCHEDULED
from serve_app.serving.gateway.stored import STORED_PATHS

_INTRODUCTION = """
# Endpoints

Keys apply to every path except probes; tenants, classes, deadlines and limits apply to scheduled ones.
If an engine does not have an endpoint, clients receive its 404.

Send the API key as `Authorization: Bearer KEY`, or as `x-api-key` like Anthropic's clients.
"""
_SCHEDULED = """
## Scheduled

These requests are queued, count against limits and are routed by their estimated tokens. If an endpoint
generates nothing, the prompt alone determines the pool. Engines send the events of the last column before
they compute anything, so these do not count as the first token.

Tests send a request to each text endpoint through the whole application in front of a vLLM engine on the CPU,
and directly to that engine. The answers are identical apart from ids and times.
"""
_UNSCHEDULED = """
## Sent to any replica

These requests cost an engine almost nothing and are not queued. Those with GET take the model from the query
(`model=NAME`); the default is the first model that the key may use.
"""
_STORED = """
## Sent to the replica that stores a response

[Stored responses](../clients.md#stored-responses) describes how that replica is found, and when its
responses are lost.
"""
_OWN = """
## Served by the gateway
"""


def endpoints_page() -> str:
    """Return the page."""
    scheduled = [
        (
            code(path),
            endpoint.summary,
            _errors(endpoint.api),
            ", ".join(map(code, endpoint.announced.types)) if endpoint.announced else "",
        )
        for path, endpoint in SCHEDULED.items()
    ]
    scheduled += [(code(path), form.summary, _errors(form.api), "") for path, form in FORMS.items()]
    unscheduled = [
        (f"POST {code(path)}", endpoint.summary, _errors(endpoint.api))
        for path, endpoint in UNSCHEDULED.items()
    ]
    unscheduled += [(f"GET {code(path)}", summary, "OpenAI") for path, summary in QUERY_ROUTES.items()]
    stored = [(f"{method} {code(path)}", summary) for path, (method, summary) in STORED_PATHS.items()]
    with_engines = {*SCHEDULED, *FORMS, *UNSCHEDULED, *QUERY_ROUTES, *STORED_PATHS}
    # Routes do not depend on models and schedulers, but a gateway needs one of each.
    settings = GatewaySettings(models=(ServedModel(name="any", max_model_len=1),))
    gateway = Gateway(settings, {"any": Mock()}, "reference")
    own = [
        (f"{route.method} {code(route.path)}", route.summary)
        for route in gateway.router.routes
        if route.summary and route.path not in with_engines
    ]
    return document(
        _INTRODUCTION,
        _SCHEDULED.strip() + "\n",
        table(("POST", "Result", "Error format", "Events before the first token"), scheduled),
        _UNSCHEDULED.strip() + "\n",
        table(("Path", "Result", "Error format"), unscheduled),
        _STORED.strip() + "\n",
        table(("Path", "Result"), stored),
        _OWN.strip() + "\n",
        table(("Path", "Result"), own),
    )


def _errors(api: ClientApi) -> str:
    return "Anthropic" if api is ANTHROPIC else "OpenAI"
