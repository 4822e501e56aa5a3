"""The log of concluded requests, in a gateway and by itself."""

import asyncio
import json
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path

import pytest

from serve_app.errors import Outcome
from serve_app.serving.gateway.request_log import RequestLog

from .builders import chat, eventually, refusal
from .conftest import Stage

CHAT = "/v1/chat/completions"


async def test_each_request_is_concluded_in_one_log_line(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    await stage.http.post(CHAT, json=chat(stream=True), headers={"x-request-id": "mine", "x-tenant": "acme"})
    await stage.http.post(CHAT, json=chat(temperature=1, max_tokens="x"))
    stage.gateway.telemetry.flush_log()
    first, second = (record.getMessage() for record in caplog.records if record.name == "ray.serve")
    for part in (
        "event=concluded outcome=completed",
        "tenant=acme",
        "pool=short",
        "attempts=1",
        "ttft_s=",
        "output_tokens=4",
        "client_request_id=mine",
    ):
        assert part in first
    assert "event=concluded outcome=rejected_invalid" in second
    assert "max_tokens is invalid" in second


async def test_a_long_error_is_cut_in_the_log(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    answer = await stage.http.post(CHAT, json=chat(service_tier="x" * 10_000, model="y" * 10_000))
    assert answer.status_code in (400, 404)
    stage.dispatcher.script.append(refusal(Outcome.REJECTED_INVALID, "z" * 10_000))
    assert len((await stage.http.post(CHAT, json=chat())).json()["error"]["message"]) == 10_000
    stage.gateway.telemetry.flush_log()
    lines = [each.getMessage() for each in caplog.records if "event=concluded" in each.getMessage()]
    assert len(lines) == 2
    assert max(map(len, lines)) < 1_000


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.getLogger("test.request_log")
    made.setLevel(logging.INFO)
    made.propagate = False
    yield made
    for handler in tuple(made.handlers):
        made.removeHandler(handler)
        handler.close()


def kept_in(file: Path, form: str, max_bytes: int = 0) -> RotatingFileHandler:
    """A file as Serve keeps its logs: open from the first record on."""
    handler = RotatingFileHandler(file, maxBytes=max_bytes, backupCount=3)
    handler.setFormatter(logging.Formatter(form))
    return handler


async def test_lines_are_written_soon_in_order_and_formatted_one_by_one(
    logger: logging.Logger, tmp_path: Path
) -> None:
    file = tmp_path / "log"
    memory = MemoryHandler(100, target=kept_in(file, "%(levelname)s %(message)s"))
    logger.addHandler(memory)
    log = RequestLog(logger)
    logger.info("before")
    for number in range(3):
        log.add(f"line={number} detail='100%s'")
    assert file.read_text() == ""
    await eventually(lambda: file.read_text().count("\n") == 4)
    assert file.read_text().splitlines() == [
        "INFO before",
        *(f"INFO line={number} detail='100%s'" for number in range(3)),
    ]


async def test_a_format_of_json_gets_one_document_a_line(logger: logging.Logger, tmp_path: Path) -> None:
    file = tmp_path / "log"

    class Document(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return json.dumps({"level": record.levelname, "message": record.getMessage()})

    handler = kept_in(file, "")
    handler.setFormatter(Document())
    logger.addHandler(handler)
    log = RequestLog(logger)
    lines = ["detail='a \"quoted\" one'", "a\\b"]
    for line in lines:
        log.add(line)
    log.flush()
    assert [json.loads(line)["message"] for line in file.read_text().splitlines()] == lines


async def test_a_full_file_is_put_away(logger: logging.Logger, tmp_path: Path) -> None:
    logger.addHandler(kept_in(tmp_path / "log", "%(message)s", max_bytes=100))
    log = RequestLog(logger)
    for number in range(3):
        for _ in range(10):
            log.add(f"batch {number} {'x' * 10}")
        log.flush()
    assert (tmp_path / "log").read_text().startswith("batch 2")
    assert (tmp_path / "log.1").read_text().startswith("batch 1")


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
    log.add("one")
    log.add("two")
    log.flush()
    assert found == ["one", "two"]


async def test_many_lines_do_not_wait(logger: logging.Logger, tmp_path: Path) -> None:
    logger.addHandler(kept_in(tmp_path / "log", "%(message)s"))
    log = RequestLog(logger)
    for number in range(1_000):
        log.add(str(number))
    assert (tmp_path / "log").read_text().split() == [str(number) for number in range(1_000)]
    log.flush()
    await asyncio.sleep(0.3)
    assert len((tmp_path / "log").read_text().split()) == 1_000
