"""The reference of endpoints: what the gateway serves, and how requests of each path are treated."""

from docs_reference.markdown import code, document, table
from serve_app.serving.gateway.answer.client_api import ANTHROPIC, ClientApi
from serve_app.serving.gateway.openapi import OWN_PATHS
from serve_app.serving.gateway.request.endpoints import FORMS, QUESTIONS, SCHEDULED, UNSCHEDULED
from serve_app.serving.gateway.stored import STORED_PATHS

_INTRODUCTION = """
# Endpoints

Keys, tenants, classes, deadlines and limits hold on every path. `GET /openapi.json` tells the fields that the
gateway reads. An engine that lacks an endpoint answers 404, and the gateway passes that on.

A key comes as `Authorization: Bearer KEY`, or as `x-api-key`, which Anthropic's clients send.
"""
_SCHEDULED = """
## Scheduled

These requests wait in the queue, count against limits and are placed by their estimated tokens. Where nothing
is generated, the prompt alone decides the pool. Events of the last column begin a stream before an engine has
computed anything: none of them counts as the first token.

Tests ask each one that takes text twice: through everything in front of a vLLM engine on the CPU, and
directly. Both answers are the same, without ids and times. Small encoders of random weights rank and embed
there.
"""
_UNSCHEDULED = """
## Asked of any replica

They cost an engine next to nothing. Those with GET take the model from the query (`model=NAME`), and else ask
the first model that the key may use.
"""
_KEPT = """
## Asked of the replica that keeps a response

[Clients](../clients.md#stored-responses) says which replica that is, and what becomes of its responses.
"""
_OWN = """
## Answered by the gateway itself
"""


def endpoints_page() -> str:
    """The whole page."""
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
    asked = [
        (f"POST {code(path)}", endpoint.summary, _errors(endpoint.api))
        for path, endpoint in UNSCHEDULED.items()
    ]
    asked += [(f"GET {code(path)}", summary, "OpenAI") for path, summary in QUESTIONS.items()]
    kept = [(f"{method} {code(path)}", summary) for path, (method, summary) in STORED_PATHS.items()]
    own = [(f"{method} {code(path)}", summary) for path, (method, summary) in OWN_PATHS.items()]
    return document(
        _INTRODUCTION,
        _SCHEDULED.strip() + "\n",
        table(("POST", "Answers with", "Errors of", "Events before the first token"), scheduled),
        _UNSCHEDULED.strip() + "\n",
        table(("Path", "Answers with", "Errors of"), asked),
        _KEPT.strip() + "\n",
        table(("Path", "Answers with"), kept),
        _OWN.strip() + "\n",
        table(("Path", "Answers with"), own),
    )


def _errors(api: ClientApi) -> str:
    return "Anthropic" if api is ANTHROPIC else "OpenAI"
