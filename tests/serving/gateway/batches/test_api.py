"""The endpoints of the Batch API, with OpenAI's own client."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import httpx
import openai
import pytest
from openai.types import Batch

from serve_app.serving.channel.scheduler_client import ChannelRequest
from serve_app.serving.gateway import ApiKey
from serve_app.serving.gateway.batches.runner import CollectingExchange
from serve_app.serving.gateway.batches.settings import BatchSettings
from serve_app.serving.gateway.batches.store import BatchStore, Storage
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.builders import MODEL, Engine, call, chat, reply_json
from tests.serving.gateway.fleet import Fleet, fleet_of

CHATS: Any = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


def line(number: int, **changes: Any) -> dict[str, Any]:
    """Return a request of an input file."""
    body = chat(max_tokens=3)
    return {"custom_id": f"id-{number}", "method": "POST", "url": CHATS, "body": body, **changes}


def contents(lines: Iterable[Any]) -> bytes:
    """Return an input file; texts are lines as they are."""
    written = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    return "\n".join(written).encode()


@asynccontextmanager
async def served(
    folder: Path, engines: list[Engine] | None = None, key: str = "none", **settings: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Fleet]]:
    """Run a gateway with a Batch API; yield OpenAI's client of it, and the fleet."""
    async with fleet_of(engines or [Engine()], **settings) as fleet:
        fleet.gateway.start_batches(folder)
        url = f"http://127.0.0.1:{fleet.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            yield client, fleet
        await fleet.gateway.drain(1.0, 1.0)


async def uploaded(client: openai.AsyncOpenAI, lines: Iterable[Any]) -> str:
    """Upload an input file, and return its id."""
    file = await client.files.create(file=("input.jsonl", contents(lines)), purpose="batch")
    return file.id


async def ended(client: openai.AsyncOpenAI, batch_id: str, within_s: float = 20.0) -> Batch:
    """Wait for the end of a batch."""
    async with asyncio.timeout(within_s):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ENDED:
                return batch
            await asyncio.sleep(0.05)


async def read_lines(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output or error file."""
    if file_id is None:
        return []
    written = await client.files.content(file_id)
    return [json.loads(each) for each in written.text.splitlines()]


async def run_batch(client: openai.AsyncOpenAI, lines: Iterable[Any], **changes: Any) -> Batch:
    """Upload a file, run its batch, and return it at its end."""
    options = {"endpoint": CHATS, "completion_window": "24h", **changes}
    batch = await client.batches.create(input_file_id=await uploaded(client, lines), **options)
    return await ended(client, batch.id)


async def test_a_batch_is_served_from_its_upload_to_its_output(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _fleet):
        file = await client.files.create(
            file=("input.jsonl", contents(map(line, range(20)))), purpose="batch"
        )
        assert (file.status, file.purpose, file.filename) == ("processed", "batch", "input.jsonl")
        created = await client.batches.create(
            input_file_id=file.id, endpoint=CHATS, completion_window="24h", metadata={"job": "nightly"}
        )
        assert created.status == "validating"
        assert created.request_counts is not None
        assert created.request_counts.total == 20
        batch = await ended(client, created.id)
        assert batch.status == "completed"
        assert batch.metadata == {"job": "nightly"}
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (20, 0)
        assert batch.error_file_id is None
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (20 * 7, 20 * 3)
        assert batch.in_progress_at is not None
        assert batch.finalizing_at is not None
        assert batch.completed_at is not None
        lines = await read_lines(client, batch.output_file_id)
        assert [each["custom_id"] for each in lines] == [f"id-{number}" for number in range(20)]
        response = lines[0]["response"]
        assert response["status_code"] == 200
        assert response["request_id"]
        assert response["body"]["choices"][0]["message"]["content"].split() == ["w0", "w1", "w2"]
        assert {each["error"] for each in lines} == {None}
        assert len({each["id"] for each in lines}) == 20


async def test_requests_of_a_batch_are_of_class_batch_and_of_the_tenant(tmp_path: Path) -> None:
    keys = (ApiKey(tenant="team", key="k1"),)
    async with served(tmp_path, key="k1", keys=keys) as (client, fleet):
        received = []
        submit = fleet.client.submit

        def receive(request: ChannelRequest) -> None:
            submission = request.submission
            assert submission.key is not None
            received.append((submission.priority, submission.tenant, submission.key.key_id))
            submit(request)

        fleet.client.submit = receive  # type: ignore[method-assign]
        batch = await run_batch(client, [line(1)])
        assert batch.status == "completed"
        assert received == [("batch", "team", "config/team")]


async def test_errors_of_single_requests_are_in_the_error_file(tmp_path: Path) -> None:
    unknown = line(2, body=chat(model="unknown"))
    invalid = line(3, body=chat(messages="none"))
    async with served(tmp_path) as (client, _):
        batch = await run_batch(client, [line(1), unknown, invalid, "", line(4)])
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
        errors = await read_lines(client, batch.error_file_id)
        statuses = {each["custom_id"]: each["response"]["status_code"] for each in errors}
        assert statuses == {"id-2": 404, "id-3": 400}
        assert errors[0]["response"]["body"]["error"]["code"] == "model_not_found"
        outputs = await read_lines(client, batch.output_file_id)
        assert [each["custom_id"] for each in outputs] == ["id-1", "id-4"]


async def test_engine_failures_are_tried_again_before_they_count(tmp_path: Path) -> None:
    async def fail(_: Any, __: Any, send: Any) -> None:
        await reply_json(send, 500, {"error": {"message": "broken", "type": "x"}})

    engine = Engine()
    # The gateway itself tries each request twice.
    engine.answers.extend([fail] * 2)
    async with served(tmp_path, [engine]) as (client, _):
        batch = await run_batch(client, [line(1)])
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 1


BAD_FILES: dict[str, tuple[Iterable[Any], str, str]] = {
    "not JSON": ([line(1), "{"], "invalid_json_line", "line 2"),
    "an array": (["[1]"], "invalid_request", "line 1"),
    "no custom_id": ([line(1), {"url": CHATS, "body": {"model": MODEL}}], "invalid_request", "line 2"),
    "no model": ([line(1, body={})], "invalid_request", "line 1"),
    "a duplicate id": ([line(1), line(2), line(1)], "duplicate_custom_id", "line 3"),
    "an unknown endpoint": ([line(1, url="/v1/images/generations")], "invalid_url", "line 1"),
    "another method": ([line(1, method="GET")], "invalid_method", "line 1"),
    "a stream": ([line(1, body=chat(stream=True))], "invalid_request", "line 1"),
    "an empty id": ([line(1, custom_id="")], "invalid_custom_id", "line 1"),
    "no request": (["", " "], "empty_file", "no request"),
    "too many requests": (map(line, range(7)), "too_many_requests", "line 7"),
}


async def test_a_mistake_in_a_file_is_reported_with_its_line(tmp_path: Path) -> None:
    async with served(tmp_path, batches=BatchSettings(max_requests=6)) as (client, _):
        for kind, (lines, code, place) in BAD_FILES.items():
            with pytest.raises(openai.BadRequestError, match=place) as caught:
                await uploaded(client, lines)
            assert caught.value.code == code, kind
            assert [each async for each in client.files.list()] == []
            assert not list((tmp_path / "files").iterdir())


async def test_requests_to_another_endpoint_fail_the_batch_with_their_line(tmp_path: Path) -> None:
    other = line(2, url="/v1/completions")
    async with served(tmp_path) as (client, _):
        batch = await run_batch(client, [line(1), other])
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        (error,) = batch.errors.data
        assert (error.code, error.line, error.param) == ("mismatched_url", 2, "url")


BAD_BATCHES: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown file": ({"input_file_id": "file-none"}, 404, "input_file_id"),
    "unknown endpoint": ({"endpoint": "/v1/images"}, 400, "endpoint"),
    "window too long": ({"completion_window": "25h"}, 400, "completion_window"),
    "window without unit": ({"completion_window": "60"}, 400, "completion_window"),
    "too much metadata": ({"metadata": {str(number): "x" for number in range(17)}}, 400, "metadata"),
    "expiry too short": (
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        400,
        "output_expires_after",
    ),
}


async def test_an_invalid_batch_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _):
        valid = {"input_file_id": await uploaded(client, [line(1)]), "endpoint": CHATS}
        for kind, (changes, status, param) in BAD_BATCHES.items():
            with pytest.raises(openai.APIStatusError) as caught:
                await client.batches.create(**{**valid, "completion_window": "24h", **changes})
            assert (caught.value.status_code, caught.value.param) == (status, param), kind


BAD_FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "JSON": ({"json": {"purpose": "batch"}}, "multipart/form-data"),
    "no file": ({"data": {"purpose": "batch"}, "files": {"other": b"x"}}, "file is missing"),
    "no purpose": ({"files": {"file": contents([line(1)])}}, "purpose is missing"),
    "another purpose": (
        {"data": {"purpose": "fine-tune"}, "files": {"file": contents([line(1)])}},
        "'fine-tune'",
    ),
    "many fields": (
        {"data": {f"field{n}": "x" for n in range(20)}, "files": {"file": contents([line(1)])}},
        "at most 20 fields",
    ),
    "a long field": (
        {"data": {"purpose": "x" * 4_097}, "files": {"file": contents([line(1)])}},
        "the field purpose is longer than 4096 bytes",
    ),
    "two files": (
        {"data": {"purpose": "batch"}, "files": [("file", contents([line(1)]))] * 2},
        "file occurs twice",
    ),
    "an expiry": (
        {
            "data": {"purpose": "batch", "expires_after[seconds]": "5"},
            "files": {"file": contents([line(1)])},
        },
        "from 3,600",
    ),
}


async def test_a_line_may_be_as_long_as_a_body_may_be_now(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, fleet):
        fleet.gateway.change({"max_body_bytes": 1_024})
        with pytest.raises(openai.BadRequestError, match="longer than 1,024 bytes"):
            await uploaded(client, [line(1, body=chat(user="x" * 1_024))])


async def test_the_contents_of_a_file_are_read_only_while_their_client_is_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.serving.gateway.batches.api._PIECE_BYTES", 100)
    async with served(tmp_path) as (client, fleet):
        path = f"/v1/files/{await uploaded(client, map(line, range(20)))}/content"

        class Leaving(CollectingExchange):
            """Client that disconnects after the first piece."""

            def write_chunk(self, piece: bytes, *, ends: bool = False) -> bool:
                self.disconnected = True
                return super().write_chunk(piece, ends=ends)

        exchange = await call(fleet.gateway, exchange=Leaving(path, None))
        assert len(exchange.pieces) == 1


async def test_an_invalid_upload_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, fleet):
        for kind, (request, message) in BAD_FORMS.items():
            response = await fleet.http.post("/v1/files", **request)
            assert response.status_code == 400, kind
            assert message in response.json()["error"]["message"]
            assert (await fleet.http.get("/v1/files")).json()["data"] == []


async def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, batches=BatchSettings(max_file_bytes=2_000)) as (client, _):
        with pytest.raises(openai.APIStatusError, match=r"longer than 2,000 bytes") as caught:
            await uploaded(client, [line(number, body=chat(user="x" * 1_000)) for number in range(80)])
        assert caught.value.status_code == 413
    async with served(tmp_path / "2", batches=BatchSettings(max_stored_bytes=1_024)) as (client, _):
        await uploaded(client, map(line, range(5)))
        with pytest.raises(openai.APIStatusError, match="delete files") as caught:
            await uploaded(client, map(line, range(5)))
        assert caught.value.code == "storage_limit_exceeded"


async def test_an_upload_over_the_limit_is_refused_before_its_bytes_are_read(tmp_path: Path) -> None:
    """By its length, and without one while it arrives."""
    settings = BatchSettings(max_stored_bytes=100_000)
    head = (
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n%b\r\n\r\n"
    )
    async with served(tmp_path, batches=settings) as (client, fleet):

        async def answer_to(*sent: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port)
            writer.writelines(sent)
            async with asyncio.timeout(5):
                answer = await reader.readuntil(b"}}")
            writer.close()
            return answer

        stated = await answer_to(head % b"content-length: 1000000")
        assert b" 413 " in stated
        assert b"storage_limit_exceeded" in stated
        part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        data = part + contents(line(number, body=chat(user="x" * 1_000)) for number in range(1_000))
        # The last chunk is missing, so the answer is about what has arrived.
        chunked = await answer_to(head % b"transfer-encoding: chunked", b"%x\r\n%b\r\n" % (len(data), data))
        assert b"storage_limit_exceeded" in chunked
        assert [each async for each in client.files.list()] == []
        assert not list((tmp_path / "files").iterdir())


async def test_uploads_at_the_same_time_do_not_exceed_the_limit_together(tmp_path: Path) -> None:
    async with served(tmp_path, batches=BatchSettings(max_stored_bytes=3_000)) as (client, _):
        lines = [line(number) for number in range(12)]
        results = await asyncio.gather(*(uploaded(client, lines) for _ in range(8)), return_exceptions=True)
        refused = [each for each in results if isinstance(each, openai.APIStatusError)]
        assert {each.code for each in refused} == {"storage_limit_exceeded"}
        files = [each async for each in client.files.list()]
        assert len(files) == 8 - len(refused) == 3_000 // len(contents(lines))


async def test_a_tenant_has_limits_of_files_and_of_open_batches(tmp_path: Path) -> None:
    keys = (ApiKey(tenant="a", key="ka"), ApiKey(tenant="b", key="kb"))
    settings = BatchSettings(max_files=3, max_open_batches=2)
    options: dict[str, Any] = {"endpoint": CHATS, "completion_window": "24h"}
    async with served(tmp_path, [Engine(token_delay_s=10.0)], key="ka", keys=keys, batches=settings) as (
        client,
        _,
    ):
        files = [await uploaded(client, [line(1)]) for _ in range(3)]
        with pytest.raises(openai.APIStatusError, match="3 files, the limit") as too_many:
            await uploaded(client, [line(1)])
        assert (too_many.value.status_code, too_many.value.code) == (413, "storage_limit_exceeded")
        batches = [await client.batches.create(input_file_id=each, **options) for each in files[:2]]
        with pytest.raises(openai.RateLimitError, match="max_open_batches") as busy:
            await client.batches.create(input_file_id=files[2], **options)
        assert busy.value.code == "batch_limit_exceeded"
        other = client.with_options(api_key="kb")
        await other.batches.create(input_file_id=await uploaded(other, [line(1)]), **options)
        await client.batches.cancel(batches[0].id)
        await ended(client, batches[0].id)
        await client.batches.create(input_file_id=files[2], **options)


@pytest.mark.parametrize("error", [TimeoutError("no response"), FileNotFoundError("no such bucket")])
async def test_an_upload_that_cannot_be_stored_does_not_count_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def url_to_fs(_: str) -> NoReturn:
        raise error

    async with served(tmp_path, batches=BatchSettings(max_files=1)) as (client, _):
        with monkeypatch.context() as outage:
            outage.setattr(fsspec.core, "url_to_fs", url_to_fs)
            with pytest.raises(openai.InternalServerError, match=f"nothing was stored.*{error}") as rejected:
                await uploaded(client, [line(1)])
        assert (rejected.value.status_code, rejected.value.code) == (503, "storage_unavailable")
        await uploaded(client, [line(1)])


async def test_ended_batches_and_all_of_their_files_are_deleted_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.serving.gateway.batches.runner._SWEEP_S", 0.1)
    async with served(tmp_path) as (client, _):
        ended_one = await run_batch(client, [line(1)])
        file = await client.files.retrieve(ended_one.input_file_id)
        assert file.expires_at == file.created_at + 30 * 86_400
        now = time.time() + 30 * 86_400
        monkeypatch.setattr("serve_app.serving.gateway.batches.runner.time", lambda: now)
        await wait_until(lambda: not list((tmp_path / "files").iterdir()))
        assert (await client.batches.retrieve(ended_one.id)).status == "completed"
        now += 86_400
        database = BatchStore(tmp_path / "batches.sqlite")
        await wait_until(lambda: not database.last_batches(9))
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve(ended_one.id)


async def test_files_and_batches_belong_to_their_tenant(tmp_path: Path) -> None:
    keys = (ApiKey(tenant="a", key="ka"), ApiKey(tenant="b", key="kb"))
    async with served(tmp_path, key="ka", keys=keys) as (client, _):
        file_id = await uploaded(client, [line(1)])
        batch = await run_batch(client, [line(1)])
        stranger = client.with_options(api_key="kb")
        calls = [
            stranger.files.retrieve(file_id),
            stranger.files.content(file_id),
            stranger.files.delete(file_id),
            stranger.batches.retrieve(batch.id),
            stranger.batches.cancel(batch.id),
            stranger.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h"),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call
        assert [each async for each in stranger.files.list()] == []
        assert [each async for each in stranger.batches.list()] == []
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="none").batches.list()


async def test_lists_are_paged(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _):
        files = [await uploaded(client, [line(number)]) for number in range(5)]
        assert [each.id async for each in client.files.list(limit=2, order="asc")] == files
        assert [each.id async for each in client.files.list(limit=2)] == files[::-1]
        options = {"endpoint": CHATS, "completion_window": "24h"}
        batches = [(await client.batches.create(input_file_id=each, **options)).id for each in files]
        page = await client.batches.list(limit=3)
        assert page.has_more
        assert [each.id async for each in page] == batches[::-1]
        with pytest.raises(openai.BadRequestError, match="limit must be from 1 to 100"):
            await client.batches.list(limit=101)


async def test_a_file_is_deleted_unless_a_batch_reads_it(tmp_path: Path) -> None:
    engine = Engine(token_delay_s=0.2)
    async with served(tmp_path, [engine]) as (client, _):
        file_id = await uploaded(client, [line(1)])
        batch = await client.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h")
        with pytest.raises(openai.ConflictError, match=batch.id):
            await client.files.delete(file_id)
        await ended(client, batch.id)
        assert (await client.files.delete(file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file_id)


async def test_a_file_whose_time_has_passed_is_gone(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _):
        file_id = await uploaded(client, [line(1)])
        storage = Storage(tmp_path)
        record = await storage(BatchStore.file, file_id, "default")
        assert record is not None
        record.expires_at = 1
        await storage(BatchStore.put_file, record)
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file_id)
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h")


async def test_a_cancelled_batch_ends_with_what_it_has(tmp_path: Path) -> None:
    engine = Engine(token_delay_s=0.1)
    async with served(tmp_path, [engine]) as (client, _fleet):
        created = await client.batches.create(
            input_file_id=await uploaded(client, map(line, range(300))),
            endpoint=CHATS,
            completion_window="24h",
        )
        await wait_until(lambda: len(engine.bodies) > 8)
        cancelled = await client.batches.cancel(created.id)
        assert cancelled.status == "cancelling"
        batch = await ended(client, created.id)
        assert batch.status == "cancelled"
        await wait_until(lambda: engine.running == 0)
        outputs = await read_lines(client, batch.output_file_id)
        errors = await read_lines(client, batch.error_file_id)
        assert len(outputs) + len(errors) == 300
        assert {each["custom_id"] for each in (*outputs, *errors)} == {f"id-{n}" for n in range(300)}
        assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
        # A second call changes nothing.
        assert (await client.batches.cancel(created.id)).status == "cancelled"


async def test_without_a_folder_the_endpoints_say_so() -> None:
    async with fleet_of([Engine()]) as fleet:
        response = await fleet.http.get("/v1/batches")
        assert response.status_code == 501
        assert "gateway.batches.folder" in response.json()["error"]["message"]


async def test_other_methods_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, fleet):
        response = await fleet.http.put("/v1/files")
        assert (response.status_code, response.headers["allow"]) == (405, "POST, GET")
        assert (await fleet.http.post("/v1/batches/batch_1/content")).status_code == 404


async def test_nothing_is_written_before_the_first_use(tmp_path: Path) -> None:
    async with served(tmp_path / "folder") as (_, fleet):
        await asyncio.sleep(0.1)
        assert isinstance(fleet.http, httpx.AsyncClient)
        assert not (tmp_path / "folder").exists()
