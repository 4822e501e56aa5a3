"""Requests that schemathesis generates for every route: all answers must conform to the API's errors."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec.inspect as inspected
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serve_app.serving.gateway.admin import ENDPOINTS_PATH, KEYS_PATH, MODE_PATH, EndpointChange, ModeChange
from serve_app.serving.gateway.answer.responses import ANTHROPIC
from serve_app.serving.gateway.batches.api import BATCHES_PATH, FILES_PATH, BatchBody
from serve_app.serving.gateway.request.endpoints import ENDPOINTS, FORMS, OTHER, QUERY_ROUTES
from tests.fuzz.threaded_gateway import gateway_in_a_thread
from tests.serving.gateway.builders import FakeDispatcher, gateway

_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    allow_header_conformance,
]
_ENDINGS = (200, 400, 401, 403, 404, 409, 413, 415, 429, 501, 502, 503, 504, 507, 529)
_BODIES: Mapping[str, type] = {
    **{path: endpoint.fields for path, endpoint in ENDPOINTS.items()},
    ENDPOINTS_PATH: EndpointChange,
    MODE_PATH: ModeChange,
    BATCHES_PATH: BatchBody,
}
_PLAIN = {inspected.StrType: "string", inspected.BoolType: "boolean", inspected.NoneType: "null"}
_TEXT = {"type": "string"}
_UPLOAD = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
}


def description() -> dict[str, Any]:
    """Return an OpenAPI description of the declared routes: the fields that parsers read, and errors."""
    app = gateway(FakeDispatcher([]))
    paths: dict[str, Any] = {}
    for route in app.router.routes:
        # Routes without a summary are files.
        if route.summary:
            paths.setdefault(route.path, {})[route.method.lower()] = _operation(route.method, route.path)
    app.close()
    return {
        "openapi": "3.1.0",
        "info": {"title": "gateway", "version": "1"},
        "paths": paths,
        "components": {"schemas": dict(_structs(_BODIES.values()))},
    }


def _operation(method: str, path: str) -> dict[str, Any]:
    found = [_parameter(name, "path") for name in re.findall(r"{(\w+)}", path)]
    if path in QUERY_ROUTES:
        found.append(_parameter("model", "query"))
    operation: dict[str, Any] = {"parameters": found, "responses": _responses(path)}
    kind = "multipart/form-data" if path in {*FORMS, FILES_PATH} else "application/json"
    body: dict[str, Any] | None = None
    if path in _BODIES:
        body = _reference(_BODIES[path])
    elif path == FILES_PATH:
        body = _UPLOAD
    elif path.startswith(KEYS_PATH) and method == "POST":
        body = {"type": "object"}
    if body is not None and method != "GET":
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": body}}}
    return operation


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": _TEXT}


def _responses(path: str) -> dict[str, Any]:
    error: dict[str, Any] = {
        "type": "object",
        "required": ["message", "type"],
        "properties": {"message": _TEXT, "type": _TEXT},
    }
    body = {"type": "object", "required": ["error"], "properties": {"error": error}}
    if ENDPOINTS.get(path, OTHER).api is ANTHROPIC:
        body = {**body, "required": ["type", "error"]}
        body["properties"] = {"error": error, "type": {"const": "error"}}
    else:
        error["properties"]["param"] = {"type": ["string", "null"]}
        error["properties"]["code"] = {"type": ["string", "integer", "null"]}
    rejected = {"description": "", "content": {"application/json": {"schema": body}}}
    return {str(status): {"description": ""} if status == 200 else rejected for status in _ENDINGS}


def _structs(types: Iterable[type]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of all structs that these types contain, by name."""
    waiting, seen = [inspected.type_info(each) for each in types], set()
    while waiting:
        match waiting.pop():
            case inspected.StructType(cls=cls, fields=fields):
                if cls in seen:
                    continue
                seen.add(cls)
                waiting += [field.type for field in fields]
                required = [field.encode_name for field in fields if field.required]
                properties = {field.encode_name: _schema(field.type) for field in fields}
                yield cls.__name__, {"type": "object", "required": required, "properties": properties}
            case inspected.UnionType(types=several):
                waiting += several
            case inspected.ListType(item_type=item):
                waiting.append(item)


def _schema(found: inspected.Type) -> dict[str, Any]:
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
        case inspected.BytesType():
            return {"type": "string", "format": "binary"}
    # Fields without a type here are passed to the engine unchanged.
    name = _PLAIN.get(type(found))
    return {} if name is None else {"type": name}


def _reference(cls: type) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{cls.__name__}"}


DESCRIPTION: Any = schemathesis.openapi.from_dict(description())
OPERATIONS = [found.ok() for found in DESCRIPTION.get_all_operations()]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with gateway_in_a_thread() as address:
        yield address


# schemathesis's own `parametrize` uses subtests, whose failures xdist does not count.
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_answers_of_each_route_conform_to_its_api(operation: Any, url: str) -> None:
    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=operation.as_strategy())
    def conforms(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(base_url=url, checks=_CHECKS)

    conforms()
