"""Requests that schemathesis generates from the OpenAPI description: all answers must conform to it."""

from collections.abc import Iterator
from typing import Any

import httpx
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

from serve_app.serving.gateway.openapi import openapi_document
from serve_app.serving.gateway.request.endpoints import SCHEDULED
from tests.fuzz.threaded_gateway import gateway_in_a_thread
from tests.serving.gateway.builders import MODEL

_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    allow_header_conformance,
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with gateway_in_a_thread() as address:
        yield address


DESCRIPTION: Any = schemathesis.openapi.from_dict(openapi_document())
OPERATIONS = [found.ok() for found in DESCRIPTION.get_all_operations()]


# schemathesis's own `parametrize` uses subtests, whose failures xdist does not count.
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_an_operation_conforms_to_its_description(operation: Any, url: str) -> None:
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


def test_the_description_is_served_and_every_path_in_it_is_there(url: str) -> None:
    served = httpx.get(f"{url}/openapi.json").json()
    assert served == openapi_document()
    for path, operations in served["paths"].items():
        for method in operations:
            named = path.replace("{model}", MODEL).replace("{response_id}", "resp_1")
            named = named.replace("{file_id}", "file-1").replace("{batch_id}", "batch_1")
            answer = httpx.request(method, url + named)
            if "resp_1" in named:
                assert answer.json()["error"]["code"] == "response_not_found"
                continue
            if "file-1" in named or "batch_1" in named:
                assert answer.json()["error"]["message"].startswith("there is no")
                continue
            assert answer.status_code not in {404, 405}, (method, path)
    assert set(SCHEDULED) <= set(served["paths"])
