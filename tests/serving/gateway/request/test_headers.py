"""Request and response headers."""

from typing import NoReturn

import pytest

from serve_app.request import PriorityClass
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.keys import ApiKey, Caller
from serve_app.serving.gateway.request import fields

ANYONE = Caller()


def test_a_request_id_is_echoed_cleaned_or_made() -> None:
    assert fields.request_id(None, "gw-1") == "gw-1"
    assert fields.request_id(b"", "gw-1") == "gw-1"
    assert fields.request_id(b"trace:7/a", "gw-1") == "trace:7/a"
    assert fields.request_id(b'a b"\r\n\xff', "gw-1") == "a_b____"
    assert len(fields.request_id(b"x" * 5000, "gw-1")) == 128


def class_of(
    header: bytes | None = None, tier: str | None = None, priority: int | None = None, caller: Caller = ANYONE
) -> PriorityClass:
    requested = fields.requested_class(header, tier, priority)
    if requested is None:
        return caller.default_class
    caller.check_class(*requested)
    return requested[0]


@pytest.mark.parametrize(
    ("header", "tier", "priority", "expected"),
    [
        (None, None, None, PriorityClass.DEFAULT),
        (b"batch", None, None, PriorityClass.BATCH),
        (b" Interactive ", "flex", 7, PriorityClass.INTERACTIVE),
        (None, "priority", 7, PriorityClass.INTERACTIVE),
        (None, "flex", -7, PriorityClass.BATCH),
        (None, "auto", None, PriorityClass.DEFAULT),
        (None, "default", -7, PriorityClass.DEFAULT),
        (None, None, -1, PriorityClass.INTERACTIVE),
        (None, None, 0, PriorityClass.DEFAULT),
        (None, None, 1, PriorityClass.BATCH),
        (None, "auto", 1, PriorityClass.BATCH),
    ],
)
def test_the_class_is_that_of_the_header_or_the_service_tier_or_vllms_priority(
    header: bytes | None, tier: str | None, priority: int | None, expected: PriorityClass
) -> None:
    assert class_of(header, tier, priority) is expected


def test_a_request_that_names_no_class_has_that_of_its_key() -> None:
    key = ApiKey(tenant="a", key="k", highest_class=PriorityClass.BATCH)
    caller = Caller.with_key(key.record("k"))
    assert {class_of(None, "auto", 0, caller), class_of(None, None, 3, caller)} == {PriorityClass.BATCH}
    with pytest.raises(RequestRejected, match=r"class interactive \(priority\); it may use: batch"):
        class_of(None, None, -1, caller)


def test_bad_values_are_rejected_by_name_and_value() -> None:
    with pytest.raises(RequestRejected, match="x-priority: 'urgent' is not valid; accepted: interactive"):
        class_of(b"urgent")
    with pytest.raises(RequestRejected, match="service_tier: 'gold'"):
        class_of(None, "gold", 1)
    with pytest.raises(RequestRejected, match="x-queue: 'wait'"):
        fields.queue_options({b"x-queue": b"wait"})
    with pytest.raises(RequestRejected, match="x-ewsjf-queue: 'often'"):
        fields.queue_options({fields.QUEUE_HEADER: b"often"})
    with pytest.raises(RequestRejected, match="content-encoding: 'gzip'"):
        fields.reject_encoded_body(b"gzip")


@pytest.mark.parametrize("value", [b"0", b"-1", b"nan", b"inf", b"soon", b"", b"1e9"])
def test_a_queue_timeout_must_be_a_sensible_number(value: bytes) -> None:
    with pytest.raises(RequestRejected, match="x-queue-timeout-s"):
        fields.queue_options({b"x-queue-timeout-s": value})


def test_connection_headers_and_those_of_the_gateway_are_not_forwarded() -> None:
    raw = [
        (b"content-type", b"application/json"),
        (b"traceparent", b"00-1"),
        (b"host", b"gw"),
        (b"authorization", b"Bearer k"),
        (b"accept-encoding", b"gzip"),
        (b"x-replica-token", b"forged"),
        (b"x-request-id", b"1"),
        (b"expect", b"100-continue"),
        (b"te", b"trailers"),
        (b"connection", b"keep-alive, X-Hop"),
        (b"x-hop", b"1"),
    ]
    assert fields.forwarded(raw, dict(raw)) == b"content-type: application/json\r\ntraceparent: 00-1\r\n"


@pytest.mark.parametrize("value", [b"a\r\nx-replica-token: forged", b"a\nb", b"a\rb"])
def test_a_smuggled_line_break_is_rejected(value: bytes) -> None:
    raw = [(b"traceparent", value)]
    with pytest.raises(RequestRejected, match="line break"):
        fields.forwarded(raw, dict(raw))


def test_the_engines_own_connection_headers_do_not_return() -> None:
    raw = [
        (b"content-type", b"text/plain"),
        (b"content-length", b"3"),
        (b"transfer-encoding", b"chunked"),
        (b"server", b"uvicorn"),
        (b"x-engine", b"1"),
    ]
    assert fields.response_headers(raw) == [(b"content-type", b"text/plain"), (b"x-engine", b"1")]


async def test_a_request_head_names_the_replica_and_carries_its_token() -> None:
    replica = ReplicaAddress(replica_id="r", pool="short", host="fe80::1", port=7, token="t")

    async def not_called(*_: object) -> NoReturn:
        raise AssertionError("nothing is read or sent")

    assert fields.upstream_head("POST", "/v1/x", "g1-1", b"a: b\r\n", replica, 5) == (
        b"POST /v1/x HTTP/1.1\r\nhost: [fe80::1]:7\r\nx-replica-token: t\r\n"
        b"x-request-id: g1-1\r\ncontent-length: 5\r\na: b\r\n\r\n"
    )
