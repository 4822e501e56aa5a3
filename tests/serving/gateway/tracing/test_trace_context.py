"""Accepted forms of `traceparent`, and span names."""

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, server_attributes

from serve_app.serving.gateway.request.endpoints import FORMS, SCHEDULED
from serve_app.serving.gateway.tracing import request_trace
from serve_app.serving.gateway.tracing.request_trace import trace_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def read(value: str) -> bool:
    return trace_parent({b"traceparent": value.encode()}) is not None


def test_a_parent_is_read() -> None:
    found = trace_parent({b"traceparent": f"00-{TRACE}-{SPAN}-03".encode()})
    assert found is not None
    assert (found.trace_id.decode(), found.span_id.decode(), found.flags) == (TRACE, SPAN, 3)
    assert found.is_sampled
    assert trace_parent({}) is None


def test_later_versions_may_have_more_fields() -> None:
    assert read(f"01-{TRACE}-{SPAN}-01")
    assert read(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"01-{TRACE}-{SPAN}-01x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_an_invalid_parent_is_ignored(value: str) -> None:
    assert not read(value)


def test_names_are_those_of_the_conventions() -> None:
    ours = {
        name: value
        for name, value in vars(request_trace).items()
        if isinstance(value, str) and name.isupper() and not name.startswith("_")
    }
    modules = (gen_ai_attributes, error_attributes, http_attributes, server_attributes)
    theirs = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    conventional = {
        value for value in ours.values() if value.split(".")[0] in ("gen_ai", "http", "server", "error")
    }
    assert len(conventional) == 21
    assert conventional <= theirs
    assert all(value.startswith("ewsjf") for value in ours.values() if value not in conventional)


def test_every_scheduled_path_has_an_operation() -> None:
    assert all(endpoint.operation for endpoint in (*SCHEDULED.values(), *FORMS.values()))
    words = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert {"chat", "text_completion", "embeddings"} <= words
