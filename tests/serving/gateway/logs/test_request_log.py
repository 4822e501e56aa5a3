"""Log of concluded requests: in a gateway, and alone."""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from ray._common.formatters import JSONFormatter
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import ServeComponentFilter

from serve_app.errors import Outcome
from serve_app.serving.gateway.batches.runner import CollectingExchange
from serve_app.serving.gateway.keys import ApiKey
from serve_app.serving.gateway.path import Attempt
from serve_app.serving.gateway.request_log import (
    MAX_REJECTED_LINES,
    ConcludedRequest,
    RequestLog,
    json_fields,
    text_line,
)
from tests.serving.channel.harness import wait_until

from ..builders import MODEL, chat, rejection, request_of
from ..conftest import GatewayHarness, running_gateway

CHAT = "/v1/chat/completions"


async def test_a_line_has_the_status_the_key_and_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with running_gateway(keys=(ApiKey(tenant="acme", key="s3cret-of-acme"),)) as harness:
        key = {"authorization": "Bearer s3cret-of-acme"}
        traced = {
            "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01",
            "x-forwarded-for": "9.9.9.9, 8.8.8.8",
        }
        streamed = await harness.http.post(CHAT, json=chat(stream=True), headers={**key, **traced})
        assert streamed.status_code == 200
        harness.dispatcher.script.append(rejection(Outcome.REJECTED_QUEUE_FULL, "full", 3.0))
        assert (await harness.http.post(CHAT, json=chat(), headers=key)).status_code == 429
        assert (await harness.http.post(CHAT, json=chat())).status_code == 401
        harness.gateway.telemetry.flush_log()
    served, full, unknown = (each.getMessage() for each in caplog.records if "concluded" in each.getMessage())
    assert "outcome=completed status=200 " in served
    assert " tenant=acme key=config/acme client=127.0.0.1 forwarded_for=9.9.9.9,8.8.8.8 " in served
    assert f" trace_id={trace_id}" in served
    assert all(part in served for part in (" pool=short ", " attempts=1 ", " ttft_s=", " output_tokens=4 "))
    assert "outcome=rejected_queue_full status=429 " in full
    assert " key=config/acme client=127.0.0.1 " in full
    assert "trace_id" not in full
    assert "outcome=rejected_unauthorised status=401 " in unknown
    assert "detail='an API key is required" in unknown
    assert "s3cret" not in caplog.text


async def test_every_rejection_has_the_key_and_the_status_that_the_client_got(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    async with running_gateway(keys=(ApiKey(tenant="acme", key="s3cret-of-acme"),)) as harness:
        harness.http.headers["authorization"] = "Bearer s3cret-of-acme"
        answers = [
            await harness.http.post("/tokenize", json={"model": "another", "prompt": "hi"}),
            await harness.http.get("/v1/models/another"),
            await harness.http.post("/v1/messages", json={"model": "another", "messages": []}),
        ]
        harness.gateway.telemetry.flush_log()
    lines = [each.getMessage() for each in caplog.records if "concluded" in each.getMessage()]
    assert all(f" status={answer.status_code} " in line for answer, line in zip(answers, lines, strict=True))
    assert all(" tenant=acme key=config/acme " in line for line in lines)


async def test_a_long_error_is_cut_in_the_log(
    harness: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    answer = await harness.http.post(CHAT, json=chat(service_tier="x" * 10_000, model="y" * 10_000))
    assert answer.status_code in (400, 404)
    harness.dispatcher.script.append(rejection(Outcome.REJECTED_INVALID, "z" * 10_000))
    assert len((await harness.http.post(CHAT, json=chat())).json()["error"]["message"]) == 10_000
    harness.gateway.telemetry.flush_log()
    lines = [each.getMessage() for each in caplog.records if "event=concluded" in each.getMessage()]
    assert len(lines) == 2
    assert max(map(len, lines)) < 1_000


class FromAddress(CollectingExchange):
    """Request of a client with this address."""

    client = ("10.1.2.3", 5)


def concluded(
    number: int = 0,
    outcome: Outcome = Outcome.COMPLETED,
    exchange: type[CollectingExchange] = CollectingExchange,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> ConcludedRequest:
    """Build a minimal concluded request."""
    head = [(b"x-request-id", b"c-%d" % number), *headers]
    return ConcludedRequest(
        request_id=f"g-{number}",
        arrived_at=0.0,
        finished_at=1.0,
        outcome=outcome,
        prompt_tokens=0,
        output_tokens=0,
        request=request_of(exchange(CHAT, b"", head), f"g-{number}"),
        model=MODEL,
        endpoint=CHAT,
        status=200,
    )


FULL = replace(
    concluded(
        7, exchange=FromAddress, headers=[(b"traceparent", b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-00")]
    ),
    key_id="config/acme",
    dispatched_at=0.25,
    first_token_at=0.5,
    pool="short",
    replica="r1",
    length_queue="0-256",
    estimated_tokens=44,
    prompt_tokens=3,
    output_tokens=9,
    tenant="acme",
    detail="a 'quoted' \"word\"\nand a line",
)


_ATTEMPT = Attempt(None, None, 0.0)  # type: ignore[arg-type]  # only counted
FULL.request.attempts = [_ATTEMPT, _ATTEMPT]


def test_text_and_json_agree() -> None:
    fields = json_fields(FULL)
    assert fields == {
        "event": "concluded",
        "outcome": "completed",
        "status": 200,
        "model": MODEL,
        "endpoint": CHAT,
        "class": "default",
        "tenant": "acme",
        "key": "config/acme",
        "client": "10.1.2.3",
        "e2e_s": 1.0,
        "queue_wait_s": 0.25,
        "pool": "short",
        "replica": "r1",
        "length_queue": "0-256",
        "estimated_tokens": 44,
        "attempts": 2,
        "ttft_s": 0.5,
        "prompt_tokens": 3,
        "output_tokens": 9,
        "request_id": "g-7",
        "client_request_id": "c-7",
        "trace_id": "ab" * 16,
        "detail": FULL.detail,
    }
    line = text_line(FULL)
    before, _, detail = line.partition(" detail=")
    assert detail == repr(FULL.detail)
    logged = dict(part.split("=", 1) for part in before.split(" "))
    assert list(logged) == [name for name in fields if name != "detail"]
    times = {name: logged.pop(name) for name in ("e2e_s", "queue_wait_s", "ttft_s")}
    assert times == {"e2e_s": "1.0000", "queue_wait_s": "0.2500", "ttft_s": "0.5000"}
    assert logged == {name: str(fields[name]) for name in logged}


@pytest.mark.parametrize(
    ("headers", "forwarded_for"),
    [
        ([], None),
        (["6.6.6.6, 7.7.7.7", "1.2.3.4"], "6.6.6.6,7.7.7.7,1.2.3.4"),
        (["2001:db8::1"], "2001:db8::1"),
        (["a b outcome=completed\t[", "::1"], "a_b_outcome_completed_[,::1"),
        ([", ,"], None),
    ],
)
def test_the_client_is_the_peer_whatever_a_header_claims(
    headers: list[str], forwarded_for: str | None
) -> None:
    raw = [(b"x-forwarded-for", value.encode()) for value in headers]
    fields = json_fields(concluded(headers=raw, exchange=FromAddress))
    assert (fields["client"], fields.get("forwarded_for")) == ("10.1.2.3", forwarded_for)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.getLogger("test.request_log")
    made.setLevel(logging.INFO)
    made.propagate = False
    yield made
    for handler in tuple(made.handlers):
        made.removeHandler(handler)
        handler.close()


def rotating_log(file: Path, formatter: logging.Formatter, max_bytes: int = 0) -> RotatingFileHandler:
    """Open a log file as Ray Serve does: from the first record on."""
    handler = RotatingFileHandler(file, maxBytes=max_bytes, backupCount=3)
    handler.setFormatter(formatter)
    return handler


PLAIN = logging.Formatter("%(message)s")


def json_log(file: Path) -> MemoryHandler:
    """Open a log file as Ray Serve does for `logging_config.encoding: JSON`."""
    handler = MemoryHandler(1, target=rotating_log(file, JSONFormatter()))
    handler.addFilter(ServeComponentFilter("app_gateway", "gateway-1", ServeComponentType.REPLICA))
    return handler


def documents(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_lines_are_written_soon_in_order_and_formatted_one_by_one(
    logger: logging.Logger, tmp_path: Path
) -> None:
    file = tmp_path / "log"
    memory = MemoryHandler(100, target=rotating_log(file, logging.Formatter("%(levelname)s %(message)s")))
    logger.addHandler(memory)
    log = RequestLog(logger)
    logger.info("before")
    made = [replace(each, detail="100%s") for each in map(concluded, range(3))]
    for each in made:
        log.add(each)
    assert file.read_text() == ""
    await wait_until(lambda: file.read_text().count("\n") == 4)
    assert file.read_text().splitlines() == ["INFO before", *(f"INFO {text_line(each)}" for each in made)]


async def test_a_format_of_json_gets_one_document_a_line_with_fields(
    logger: logging.Logger, tmp_path: Path
) -> None:
    file = tmp_path / "log"
    logger.addHandler(json_log(file))
    log = RequestLog(logger)
    rejected = concluded(1, Outcome.REJECTED_QUEUE_FULL)
    log.add(FULL)
    log.add(rejected)
    log.flush()
    own = {"levelname": "INFO", "message": "concluded", "deployment": "app_gateway", "gateway": "gateway-1"}
    for document, record in zip(documents(file), (FULL, rejected), strict=True):
        assert document.items() >= {**own, **json_fields(record)}.items()


async def test_another_format_of_json_gets_the_line_as_text(logger: logging.Logger, tmp_path: Path) -> None:
    class Nested(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return json.dumps({"body": {"text": record.getMessage()}})

    logger.addHandler(rotating_log(tmp_path / "log", Nested()))
    log = RequestLog(logger)
    log.add(FULL)
    log.flush()
    assert [each["body"]["text"] for each in documents(tmp_path / "log")] == [text_line(FULL)]


async def test_a_full_file_is_put_away(logger: logging.Logger, tmp_path: Path) -> None:
    logger.addHandler(rotating_log(tmp_path / "log", PLAIN, max_bytes=100))
    log = RequestLog(logger)
    for number in range(3):
        for _ in range(10):
            log.add(concluded(number))
        log.flush()
    assert "request_id=g-2 " in (tmp_path / "log").read_text().splitlines()[0]
    assert "request_id=g-1 " in (tmp_path / "log.1").read_text().splitlines()[0]


async def test_other_handlers_get_a_record_for_each_line_that_passes_their_level(
    logger: logging.Logger,
) -> None:
    found: list[str] = []

    class Collected(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    for level in (logging.INFO, logging.ERROR):
        handler = Collected()
        handler.setLevel(level)
        logger.addHandler(handler)
    log = RequestLog(logger)
    log.add(concluded(1))
    log.add(concluded(2))
    log.flush()
    assert found == [text_line(concluded(1)), text_line(concluded(2))]


async def test_many_lines_do_not_wait(logger: logging.Logger, tmp_path: Path) -> None:
    logger.addHandler(rotating_log(tmp_path / "log", PLAIN))
    log = RequestLog(logger)
    made = [concluded(number) for number in range(1_000)]
    for each in made:
        log.add(each)
    assert (tmp_path / "log").read_text().splitlines() == [text_line(each) for each in made]
    log.flush()
    await asyncio.sleep(0.3)
    assert len((tmp_path / "log").read_text().splitlines()) == 1_000


async def test_a_flood_of_rejections_is_counted_and_no_completed_request_is_left_out(
    logger: logging.Logger, tmp_path: Path
) -> None:
    file = tmp_path / "log"
    logger.addHandler(json_log(file))
    log = RequestLog(logger)
    for number in range(3_000):
        log.add(concluded(number, Outcome.REJECTED_QUEUE_FULL))
        if number % 2:
            log.add(concluded(number, Outcome.EXPIRED))
        if number % 3 == 0:
            log.add(concluded(number))
    log.add(concluded(0, Outcome.FAILED))
    await wait_until(lambda: "log_suppressed" in file.read_text())
    entries = documents(file)
    lines = [each["outcome"] for each in entries if each["event"] == "concluded"]
    assert lines.count("completed") == 1_000
    assert lines.count("rejected_queue_full") == lines.count("expired") == MAX_REJECTED_LINES
    assert lines.count("failed") == 1
    (suppressed,) = [each for each in entries if each["event"] == "log_suppressed"]
    assert suppressed["message"] == "log_suppressed"
    assert suppressed["rejected_queue_full"] == 3_000 - MAX_REJECTED_LINES
    assert suppressed["expired"] == 1_500 - MAX_REJECTED_LINES
    assert suppressed["count"] == 4_500 - 2 * MAX_REJECTED_LINES
    # A new second resets the limit.
    log.add(concluded(1, Outcome.EXPIRED))
    log.close()
    assert documents(file)[-1]["outcome"] == "expired"
    assert file.read_text().count("log_suppressed") == 2  # for one line


async def test_suppressed_lines_are_counted_at_the_end(logger: logging.Logger, tmp_path: Path) -> None:
    logger.addHandler(rotating_log(tmp_path / "log", PLAIN))
    log = RequestLog(logger)
    for number in range(25):
        log.add(concluded(number, Outcome.CANCELLED))
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[-1] == "event=log_suppressed count=15 cancelled=15"
    assert len(lines) == MAX_REJECTED_LINES + 1
