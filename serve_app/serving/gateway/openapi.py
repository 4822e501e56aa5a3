"""The gateway's OpenAPI 3.1 description, generated from the types that its parsers use.

It covers what the gateway itself reads. Objects allow further fields, because engines accept many more, and
answers of engines are not described.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec.inspect as inspected

from serve_app import __version__
from serve_app.serving.gateway.answer.client_api import ANTHROPIC, OPENAI, ClientApi
from serve_app.serving.gateway.batches.api import BATCH_ROUTES, FILES_PATH, BatchBody
from serve_app.serving.gateway.debug_pages import PROGRAMS_PATH, RECEIPTS_PATH
from serve_app.serving.gateway.endpoint_admin import ENDPOINTS_PATH, EndpointChange
from serve_app.serving.gateway.key_admin import KEYS_PATH
from serve_app.serving.gateway.mode_admin import MODE_PATH, ModeChange
from serve_app.serving.gateway.request.endpoints import (
    FORMS,
    QUERY_ROUTES,
    SCHEDULED,
    UNSCHEDULED,
    FormRoute,
    ModelRoute,
)
from serve_app.serving.gateway.stored import STORED_PATHS

Schema = dict[str, Any]

_BODIES: Mapping[str, ModelRoute] = {**SCHEDULED, **FORMS, **UNSCHEDULED}
_VIEWS: Mapping[str, str] = {
    "/load": "number of requests in this gateway",
    "/ping": "liveness of the gateway",
    "/v1/models": "available models",
    "/health": "liveness of the gateway",
    "/ready": "readiness: every model has a replica, or starts one on demand",
    "/metrics": "metrics for Prometheus",
    "/metrics/engines": "the engines as Prometheus targets, or with `?replica=` the metrics of one engine",
    "/openapi.json": "OpenAPI description of this API",
    "/dashboard": "dashboard page (HTML, without data)",
    "/dashboard/events": "data of the dashboard as server-sent events; for admins",
    "/debug/capture": "trace of the requests of the last ten minutes, without text; with full=true also "
    "tenants, outcomes and times; for admins",
    "/debug/costs": "engine time and imposed delay by pool, class and tenant; for admins",
    "/debug/costs.csv": "`/debug/costs` as CSV; for admins",
    "/debug/queue": "queued requests by sub-queue, with wait causes; for admins",
    "/debug/scaling": "desired replicas of each pool, with reasons; for admins",
    "/debug/status": "replicas, learned queues and the tuner; for admins",
    "/debug/tuner": "state and history of the tuner; for admins",
    "/debug/usage": "usage by API key; for admins",
    "/debug/usage.csv": "usage by API key as CSV; for admins",
}
_ACTIONS: Mapping[str, str] = {
    "/debug/tuner/freeze": "freeze the tuner; for admins",
    "/debug/tuner/thaw": "thaw the tuner; for admins",
}
_REJECTIONS: Mapping[str, str] = {
    "400": "the request is invalid, or too long for every pool",
    "401": "the API key is missing, unknown, expired or revoked",
    "403": "the API key does not permit this",
    "404": "unknown model or response",
    "409": "there is no file of keys, or it cannot be written; a file is used",
    "413": "the body is too large",
    "415": "the body is compressed or not JSON",
    "429": "the queue is full or a limit is exceeded; retry after `Retry-After`",
    "502": "the engine failed",
    "503": "no replica is available, or the server is stopping; retry after `Retry-After`",
    "501": "the engine or this gateway does not support this",
    "504": "the request timed out in the queue or in the engine",
    "507": "the storage of the Batch API is full",
    "529": "the queue is full (Anthropic's status)",
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_ERROR_NAMES: Mapping[ClientApi, str] = {OPENAI: "Error", ANTHROPIC: "AnthropicError"}
_JSON = "application/json"
_FORM = "multipart/form-data"
_PLAIN = {inspected.StrType: "string", inspected.BoolType: "boolean", inspected.NoneType: "null"}


def openapi_document() -> Schema:
    """Return the OpenAPI document."""
    bodies = (endpoint.fields for endpoint in _BODIES.values())
    types: list[type] = [*bodies, EndpointChange, ModeChange, BatchBody]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ewsjf-serve",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs, scheduled in front of vLLM engines.",
        },
        "security": [{"key": []}, {"apiKey": []}],
        "paths": dict(_paths()),
        "components": {
            "schemas": {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, **dict(_structs(types))},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _paths() -> Iterator[tuple[str, Schema]]:
    for path, endpoint in _BODIES.items():
        written_as = _FORM if isinstance(endpoint, FormRoute) else _JSON
        content = {written_as: {"schema": _reference(endpoint.fields)}}
        body = {"required": True, "content": content}
        yield path, {"post": _operation(endpoint.summary, endpoint.api, requestBody=body)}
    for path, summary in _VIEWS.items():
        yield path, {"get": _operation(summary)}
    for path, summary in QUERY_ROUTES.items():
        yield path, {"get": _operation(summary, parameters=[_model_in("query", required=False)])}
    yield (
        "/v1/models/{model}",
        {
            "get": _operation(
                "one model",
                parameters=[_model_in("path", required=True)],
            )
        },
    )
    request_id = {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}
    summary = "receipt of a request (times and wait causes), until ten minutes after its end; for admins"
    yield RECEIPTS_PATH, {"get": _operation(summary, parameters=[request_id])}
    program = {"name": "program", "in": "path", "required": True, "schema": {"type": "string"}}
    summary = "where the time of an agent program went, with its last turns; for admins"
    yield PROGRAMS_PATH, {"get": _operation(summary, parameters=[program])}
    for path, (method, summary) in STORED_PATHS.items():
        named = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
        yield path, {method.lower(): _operation(summary, parameters=[named])}
    by_path: dict[str, Schema] = {}
    for method, path, summary, _ in BATCH_ROUTES:
        by_path.setdefault(path, {})[method.lower()] = _batch_operation(path, method, summary)
    yield from by_path.items()
    for path, summary in _ACTIONS.items():
        yield path, {"post": _operation(summary)}
    change = {"required": True, "content": {_JSON: {"schema": _reference(EndpointChange)}}}
    yield (
        ENDPOINTS_PATH,
        {
            "get": _operation("endpoints of pools with external engines; for admins"),
            "post": _operation("add an endpoint, or restore a removed one; for admins", requestBody=change),
            "delete": _operation("remove an endpoint; for admins", requestBody=change),
        },
    )
    permissions = {"required": True, "content": {_JSON: {"schema": {"type": "object"}}}}
    yield (
        KEYS_PATH,
        {
            "get": _operation("API keys of the file, with what they have used; for admins"),
            "post": _operation("create an API key; for admins", requestBody=permissions),
        },
    )
    key_id = {"name": "key_id", "in": "path", "required": True, "schema": {"type": "string"}}
    yield (
        f"{KEYS_PATH}/{{key_id}}",
        {
            "post": _operation("change an API key; for admins", parameters=[key_id], requestBody=permissions),
            "delete": _operation("revoke an API key; for admins", parameters=[key_id]),
        },
    )
    share = {"required": True, "content": {_JSON: {"schema": _reference(ModeChange)}}}
    yield (
        MODE_PATH,
        {
            "get": _operation("share of the traffic that is scheduled; for admins"),
            "post": _operation(
                "change the share of the traffic that is scheduled; for admins", requestBody=share
            ),
        },
    )


def _batch_operation(path: str, method: str, summary: str) -> Schema:
    """Return an operation of the Batch API: its path names a file or batch, and two have a body."""
    more: Schema = {}
    if (found := re.search(r"\{(\w+)\}", path)) is not None:
        more["parameters"] = [
            {"name": found[1], "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    elif method == "POST" and path == FILES_PATH:
        fields = {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}}
        form = {"type": "object", "required": ["purpose", "file"], "properties": fields}
        more["requestBody"] = {"required": True, "content": {_FORM: {"schema": form}}}
    elif method == "POST":
        content = {_JSON: {"schema": _reference(BatchBody)}}
        more["requestBody"] = {"required": True, "content": content}
    return _operation(summary, **more)


def _model_in(place: str, *, required: bool) -> Schema:
    return {"name": "model", "in": place, "required": required, "schema": {"type": "string"}}


def _operation(summary: str, api: ClientApi = OPENAI, **more: object) -> Schema:
    responses: Schema = {"200": {"description": "success"}}
    for status, reason in _REJECTIONS.items():
        schema = {"$ref": f"#/components/schemas/{_ERROR_NAMES[api]}"}
        responses[status] = {"description": reason, "content": {_JSON: {"schema": schema}}}
    return {"summary": summary, **more, "responses": responses}


def _structs(types: Iterable[type]) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas of all structs that these types contain, by name."""
    waiting, seen = [inspected.type_info(each) for each in types], set()
    while waiting:
        found = waiting.pop()
        waiting += _parts(found)
        if isinstance(found, inspected.StructType) and found.cls not in seen:
            seen.add(found.cls)
            yield (
                found.cls.__name__,
                {
                    "type": "object",
                    "description": (found.cls.__doc__ or "").strip(),
                    "required": [field.encode_name for field in found.fields if field.required],
                    "properties": {field.encode_name: _schema(field.type) for field in found.fields},
                },
            )


def _parts(found: inspected.Type) -> list[inspected.Type]:
    match found:
        case inspected.StructType(fields=fields):
            return [field.type for field in fields]
        case inspected.UnionType(types=types):
            return list(types)
        case inspected.ListType(item_type=item):
            return [item]
    return []


def _schema(found: inspected.Type) -> Schema:
    match found:
        case inspected.StructType(cls=cls):
            return _reference(cls)
        case inspected.UnionType(types=types):
            return {"anyOf": [_schema(each) for each in types]}
        case inspected.ListType(item_type=item):
            return {"type": "array", "items": _schema(item)}
        case inspected.IntType(ge=least, le=most) | inspected.FloatType(ge=least, le=most):
            limits = {"minimum": least, "maximum": most}
            kind = "integer" if isinstance(found, inspected.IntType) else "number"
            return {"type": kind} | {name: limit for name, limit in limits.items() if limit is not None}
    if isinstance(found, inspected.BytesType):
        return {"type": "string", "format": "binary"}
    name = _PLAIN.get(type(found))
    # Fields without a type here are passed to the engine unchanged.
    return {} if name is None else {"type": name}


def _reference(cls: type) -> Schema:
    return {"$ref": f"#/components/schemas/{cls.__name__}"}
