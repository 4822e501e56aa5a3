"""The runner, with scripted answers instead of a gateway."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any

import pytest

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.batches import runner as runner_module
from serve_app.serving.gateway.batches.runner import Answer, BatchRequest, BatchRunner, InputReader, _Pace
from serve_app.serving.gateway.batches.store import (
    BatchRecord,
    BatchStore,
    FileRecord,
    Result,
    Storage,
    StoreError,
    Writer,
    new_id,
)
from serve_app.serving.gateway.keys import Caller
from tests.serving.channel.harness import wait_until

CHATS = "/v1/chat/completions"


@dataclass
class Gateway:
    """Serves requests of batches: each takes `delay_s`, and its answer repeats the body.

    Attributes:
        script: answers by custom marker in the body, first to last; then the usual answer.
        served: markers, one per attempt.
    """

    delay_s: float = 0.005
    script: dict[int, list[Answer]] = field(default_factory=dict)
    served: list[int] = field(default_factory=list)
    classes: Counter[str] = field(default_factory=Counter)
    running: int = 0
    most_running: int = 0

    async def serve(self, path: str, body: bytes, headers: Mapping[bytes, bytes], caller: Caller) -> Answer:
        assert (path, caller) == (CHATS, Caller())
        marker = json.loads(body)["marker"]
        self.served.append(marker)
        self.classes[headers[b"x-priority"].decode()] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        if self.script.get(marker):
            return self.script[marker].pop(0)
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        return Answer(200, {b"x-request-id": b"r"}, json.dumps({"marker": marker, "usage": usage}).encode())


class SuspendableStorage(Storage):
    """Storage of a runner that can stop extending its lease."""

    extends_lease = True

    async def __call__(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        if work is BatchStore.acquire and not self.extends_lease:
            await asyncio.Event().wait()
        return await super().__call__(work, *args, **kwargs)


def caller_of(key_id: str) -> Caller:
    """Return the caller of a key."""
    if key_id:
        raise RequestRejected(Outcome.REJECTED_UNAUTHORISED, "revoked")
    return Caller()


async def add_batch(storage: Storage, count: int, **changes: Any) -> str:
    """Store an input file and a batch of it."""
    writer = storage.contents.create("file-in")
    for marker in range(count):
        request = {"custom_id": f"c{marker}", "url": CHATS, "body": {"model": "m", "marker": marker}}
        writer.write(json.dumps(request).encode() + b"\n")
    writer.close()
    file = FileRecord(id="file-in", owner="t", filename="f", purpose="batch", created_at=0, is_complete=True)
    file.bytes = writer.bytes
    await storage(BatchStore.put_file, file)
    fields: dict[str, Any] = {
        "id": new_id("batch_"),
        "owner": "t",
        "key_id": "",
        "endpoint": CHATS,
        "input_file_id": "file-in",
        "completion_window": "24h",
        "created_at": int(time()),
        "expires_at": int(time()) + 86_400,
        "keep_output_s": 1_000,
        "total": count,
        **changes,
    }
    await storage(BatchStore.add_batch, BatchRecord(**fields))
    return str(fields["id"])


async def final(storage: Storage, batch_id: str, within_s: float = 20.0) -> BatchRecord:
    """Wait for the end of a batch."""
    async with asyncio.timeout(within_s):
        while True:
            record = await storage(BatchStore.batch, batch_id, "t")
            assert record is not None
            if not record.is_open:
                return record
            await asyncio.sleep(0.02)


def read_lines(storage: Storage, file_id: str) -> list[dict[str, Any]]:
    """Return the lines of an output or error file."""
    with storage.contents.open(file_id) as file:
        return [json.loads(each) for each in file.read().splitlines()]


def custom_ids(storage: Storage, record: BatchRecord) -> list[str]:
    """Return the ids of all output and error lines."""
    files = [each for each in (record.output_file_id, record.error_file_id) if each]
    return [each["custom_id"] for file in files for each in read_lines(storage, file)]


@asynccontextmanager
async def running(storage: Storage, gateway: Gateway, holder: str = "g1") -> AsyncIterator[BatchRunner]:
    """Run a runner."""
    found = BatchRunner(storage, gateway.serve, caller_of, holder, 1_000)
    found.start()
    yield found
    await found.stop()


async def completed(storage: Storage, gateway: Gateway, count: int, **changes: Any) -> BatchRecord:
    """Run a batch until its end."""
    batch_id = await add_batch(storage, count, **changes)
    async with running(storage, gateway):
        return await final(storage, batch_id)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times of leases and turns, and the pauses before a request is sent again."""
    pause_s = runner_module._pause_s

    def shortened(answer: Answer, failures: int) -> float | None:
        found = pause_s(answer, failures)
        return None if found is None else found / 20

    monkeypatch.setattr(runner_module, "_pause_s", shortened)
    monkeypatch.setattr(runner_module, "_LEASE_S", 0.5)
    monkeypatch.setattr(runner_module, "_TURN_S", 0.05)


async def test_every_line_has_one_result_whoever_dies(tmp_path: Path, storage: Storage) -> None:
    gateway = Gateway()
    batch_id = await add_batch(storage, 500)
    for number in range(4):
        before = asyncio.all_tasks()
        BatchRunner(Storage(tmp_path), gateway.serve, caller_of, f"g{number}", 1_000).start()
        await asyncio.sleep(0.75)
        # Dies without releasing its lease.
        for task in asyncio.all_tasks() - before:
            task.cancel()
    async with running(storage, gateway, "last"):
        record = await final(storage, batch_id)
    assert record.status == "completed"
    assert sorted(custom_ids(storage, record)) == sorted(f"c{marker}" for marker in range(500))
    assert (record.completed, record.failed) == (500, 0)
    assert record.tokens.output == 500


async def test_a_runner_that_was_suspended_stores_nothing(tmp_path: Path) -> None:
    storage, slow, quick = Storage(tmp_path), Gateway(delay_s=1.2), Gateway()
    batch_id = await add_batch(storage, 3)
    suspended = SuspendableStorage(tmp_path)
    async with running(suspended, slow, "slow"):
        await wait_until(lambda: slow.running == 3)
        # It no longer extends its lease, but its requests go on.
        suspended.extends_lease = False
        await asyncio.sleep(0.6)
        async with running(storage, quick, "quick"):
            record = await final(storage, batch_id)
            assert record.completed == 3
            await wait_until(lambda: slow.running == 0)
            await asyncio.sleep(0.2)
            assert await storage(BatchStore.batch, batch_id, "t") == record
    assert len(custom_ids(storage, record)) == 3


async def test_a_stopped_runner_hands_over_at_once(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_LEASE_S", 60.0)
    gateway = Gateway(delay_s=0.05)
    batch_id = await add_batch(storage, 200)
    async with running(storage, gateway, "g1"):
        await wait_until(lambda: len(gateway.served) > 20)
    assert gateway.running == 0
    async with running(Storage(tmp_path), gateway, "g2"):
        record = await final(storage, batch_id)
    assert len(custom_ids(storage, record)) == 200


async def test_only_one_gateway_runs_batches(tmp_path: Path, storage: Storage) -> None:
    gateway = Gateway()
    batch_id = await add_batch(storage, 50)
    async with running(storage, gateway, "g1") as one, running(Storage(tmp_path), gateway, "g2") as two:
        await final(storage, batch_id)
        assert one.is_leading != two.is_leading
    assert sorted(gateway.served) == list(range(50))


async def test_a_full_disk_delays_results_and_loses_none(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = Gateway()
    batch_id = await add_batch(storage, 1_500)
    original, is_full = BatchStore.add_results, False

    def add_results(store: BatchStore, *args: Any) -> BatchRecord:
        if is_full:
            raise StoreError("database or disk is full")
        return original(store, *args)

    monkeypatch.setattr(BatchStore, "add_results", add_results)
    async with running(storage, gateway):
        await wait_until(lambda: len(gateway.served) > 10)
        is_full = True
        await asyncio.sleep(1.0)
        served = len(gateway.served)
        await asyncio.sleep(0.5)
        # The memory limits how many are served.
        assert len(gateway.served) == served < 1_500
        is_full = False
        record = await final(storage, batch_id)
    assert len(custom_ids(storage, record)) == 1_500
    assert sorted(gateway.served) == list(range(1_500))


async def test_an_expired_batch_ends_with_what_it_has(storage: Storage) -> None:
    gateway = Gateway(delay_s=0.4)
    record = await completed(storage, gateway, 1_000, expires_at=int(time()) + 2)
    assert record.status == "expired"
    assert record.completed > 0
    assert record.failed == 1_000 - record.completed
    errors = read_lines(storage, record.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert len(set(custom_ids(storage, record))) == 1_000


async def test_a_late_batch_is_submitted_in_the_default_class(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_RATE_INTERVAL_S", 0.1)
    gateway = Gateway(delay_s=0.05)
    batch_id = await add_batch(storage, 2_000, expires_at=int(time()) + 3)
    async with running(storage, gateway):
        await final(storage, batch_id)
    assert gateway.classes["batch"] > 0
    assert gateway.classes["default"] > 0


async def test_rejections_for_lack_of_capacity_are_repeated_without_limit(storage: Storage) -> None:
    busy = Answer(429, {b"retry-after-ms": b"10"}, b"{}")
    timed_out = Answer(504, {b"retry-after-ms": b"10"}, b'{"error": {"code":"queue_timeout"}}')
    gateway = Gateway(script={0: [busy] * 8, 1: [timed_out] * 8})
    record = await completed(storage, gateway, 2)
    assert (record.completed, record.failed) == (2, 0)
    assert Counter(gateway.served) == {0: 9, 1: 9}


async def test_failures_count_beside_rejections(storage: Storage) -> None:
    busy, failed = Answer(429, {b"retry-after-ms": b"10"}, b"{}"), Answer(502, {}, b"{}")
    timed_out = Answer(504, {b"retry-after-ms": b"10"}, b'{"error": {"code":"queue_timeout"}}')
    gateway = Gateway(script={0: [busy] * 3 + [timed_out] * 3 + [failed]})
    record = await completed(storage, gateway, 1)
    assert (record.completed, len(gateway.served)) == (1, 8)


async def test_an_engine_that_fails_three_times_is_an_error(storage: Storage) -> None:
    failed = Answer(502, {}, b'{"error": {"code": "engine_failed"}}')
    gateway = Gateway(script={0: [failed] * 9})
    record = await completed(storage, gateway, 1)
    assert (record.status, record.failed, len(gateway.served)) == ("completed", 1, 3)
    assert read_lines(storage, record.error_file_id)[0]["response"]["status_code"] == 502


async def test_a_revoked_key_ends_its_requests(storage: Storage) -> None:
    gateway = Gateway()
    record = await completed(storage, gateway, 3, key_id="gone")
    assert record.failed == 3
    assert gateway.served == []
    assert read_lines(storage, record.error_file_id)[0]["response"]["status_code"] == 401


async def test_a_missing_input_file_fails_the_batch_and_its_results_remain(storage: Storage) -> None:
    gateway = Gateway(delay_s=0.05)
    batch_id = await add_batch(storage, 300)
    async with running(storage, gateway):
        await wait_until(lambda: len(gateway.served) > 20)
        await asyncio.sleep(0.2)
    storage.contents.delete("file-in")
    async with running(storage, Gateway()):
        record = await final(storage, batch_id)
    assert record.status == "failed"
    assert record.errors[0].code == "input_file_missing"
    assert 0 < record.completed < 300
    assert len(custom_ids(storage, record)) == record.completed


async def test_an_input_that_cannot_be_read_for_a_while_is_read_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.serving.gateway.batches.runner._BLOCK_BYTES", 500)
    original, reads = InputReader._next, 0

    def read(reader: InputReader) -> list[BatchRequest]:
        nonlocal reads
        reads += 1
        requests = original(reader)
        if reads in {3, 5}:
            # The position in the file has changed, and the requests are lost.
            reader._returned -= len(requests)
            raise OSError("the bucket does not answer")
        return requests

    monkeypatch.setattr(InputReader, "_next", read)
    gateway = Gateway()
    record = await completed(storage, gateway, 100)
    assert record.status == "completed"
    assert sorted(gateway.served) == list(range(100))


async def test_a_writer_that_was_suspended_cannot_harm_the_files_of_its_successor(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, wakes = Writer.write, threading.Event()
    writes = 0

    def write(writer: Writer, data: bytes) -> None:
        nonlocal writes
        writes += 1
        if writes == 1:
            wakes.wait(10)
        original(writer, data)

    batch_id = await add_batch(storage, 5)
    monkeypatch.setattr(Writer, "write", write)
    suspended = SuspendableStorage(tmp_path)
    async with running(suspended, Gateway(), "slow"):
        await wait_until(lambda: writes == 1)
        suspended.extends_lease = False
        await asyncio.sleep(0.6)
        async with running(storage, Gateway(), "quick"):
            record = await final(storage, batch_id)
            wakes.set()
    assert len(custom_ids(storage, record)) == 5


async def test_a_line_without_a_result_by_mistake_is_an_error(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = runner_module._result

    def result(record: BatchRecord, request: BatchRequest, answer: Answer) -> Result:
        if request.line == 2:
            raise RuntimeError("a bug")
        return original(record, request, answer)

    monkeypatch.setattr(runner_module, "_result", result)
    record = await completed(storage, Gateway(), 3)
    assert (record.completed, record.failed) == (2, 1)
    (error,) = read_lines(storage, record.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("c1", "internal_error")


async def test_answers_that_are_no_json_lines_remain_one_line(storage: Storage) -> None:
    answers = [Answer(200, {}, b'{\n"a":\n1}'), Answer(200, {}, b"\xfftext\nmore"), Answer(200, {}, b"[1]")]
    gateway = Gateway(script={marker: [answer] for marker, answer in enumerate(answers)})
    record = await completed(storage, gateway, 3)
    lines = read_lines(storage, record.output_file_id)
    bodies = [each["response"]["body"] for each in lines]
    assert bodies == [{"a": 1}, "\ufffdtext\nmore", [1]]


async def test_expired_files_are_deleted(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_SWEEP_S", 0.1)
    for name, expires_at, is_complete in (("a", 10, True), ("b", None, True), ("c", None, False)):
        record = FileRecord(id=name, owner="t", filename="f", purpose="batch", created_at=1)
        record.expires_at, record.is_complete, record.bytes = expires_at, is_complete, int(is_complete)
        writer = storage.contents.create(name)
        writer.write(b"x")
        writer.close()
        await storage(BatchStore.put_file, record)
    async with running(storage, Gateway()):
        await wait_until(lambda: len(list((tmp_path / "files").iterdir())) == 1)
    assert [each.name for each in (tmp_path / "files").iterdir()] == ["b"]


def test_as_many_are_submitted_as_run_and_some_more() -> None:
    pace = _Pace()
    # None waits, so the number grows.
    for _ in range(200):
        pace.on_end(0.0, 1.0, int(pace.window))
    assert pace.window > 500
    # 20 run, and all others wait.
    for _ in range(500):
        submitted = int(pace.window)
        pace.on_end(max(0.0, submitted / 20 - 1.0), 1.0, submitted)
    assert pace.window == pytest.approx(1.25 * 20 + 4, abs=3)
