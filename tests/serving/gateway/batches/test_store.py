"""The database of files and batches."""

import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_app.serving.gateway.batches import store as store_module
from serve_app.serving.gateway.batches.store import (
    BatchRecord,
    BatchStore,
    LeaseLost,
    Result,
    StoreError,
    Tokens,
    window_s,
)

TOKEN = 1


def batch(batch_id: str = "batch_1", **changes: Any) -> BatchRecord:
    """Return a batch of two requests."""
    fields: dict[str, Any] = {
        "owner": "t",
        "key_id": "",
        "endpoint": "/v1/completions",
        "input_file_id": "file-1",
        "completion_window": "24h",
        "created_at": 0,
        "expires_at": 1_000,
        "keep_output_s": 1,
        "total": 2,
        **changes,
    }
    return BatchRecord(id=batch_id, **fields)


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    """Return a store of one batch, whose lease has this token."""
    made = BatchStore(tmp_path / "db")
    made.add_batch(batch())
    assert made.acquire("g1", 0.0, 1.0) == TOKEN
    return made


def test_one_holder_has_the_lease_until_it_ends(tmp_path: Path) -> None:
    one, two = BatchStore(tmp_path / "db"), BatchStore(tmp_path / "db")
    assert one.acquire("g1", 0.0, 10.0) == 1
    assert two.acquire("g2", 9.0, 10.0) is None
    assert one.acquire("g1", 9.0, 10.0) == 1
    assert two.acquire("g2", 18.0, 10.0) is None
    assert two.acquire("g2", 19.0, 10.0) == 2
    assert one.acquire("g1", 20.0, 10.0) is None
    two.release("g2")
    assert one.acquire("g1", 20.0, 10.0) == 3


def test_a_former_holder_changes_nothing(store: BatchStore) -> None:
    assert store.acquire("g2", 2.0, 1.0) == 2
    result = Result(1, False, b"{}", Tokens())
    with pytest.raises(LeaseLost):
        store.add_results(TOKEN, "batch_1", [result])
    with pytest.raises(LeaseLost):
        store.change(TOKEN, "batch_1", lambda record: record.enter("in_progress", 1))
    with pytest.raises(LeaseLost):
        store.complete(TOKEN, "batch_1", [], lambda record: record.enter("completed", 1))
    assert store.runnable(50.0, 9) == [batch()]


def test_the_first_result_of_a_line_counts(store: BatchStore) -> None:
    first, second = Result(1, False, b"1", Tokens(5, 1, 2)), Result(1, True, b"2", Tokens(9, 9, 9))
    store.add_results(TOKEN, "batch_1", [first])
    record = store.add_results(TOKEN, "batch_1", [second])
    assert (record.completed, record.failed, record.tokens) == (1, 0, Tokens(5, 1, 2))
    assert store.outputs("batch_1", 0, errors=False) == [(1, b"1")]
    assert store.lines_with_result("batch_1", 1, 9) == {1}


def test_a_failure_leaves_everything_as_it_was(store: BatchStore) -> None:

    def fail(_: BatchRecord) -> None:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - the test's own
        store.change(TOKEN, "batch_1", fail)
    store.change(TOKEN, "batch_1", lambda record: record.enter("in_progress", 1))
    assert store.runnable(0.0, 9)[0].status == "in_progress"


def test_a_full_disk_is_an_error_and_no_damage(store: BatchStore) -> None:
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    long = Result(1, False, b"x" * 1_000_000, Tokens())
    with pytest.raises(StoreError, match="full"):
        store.add_results(TOKEN, "batch_1", [long])
    store._db.execute("PRAGMA max_page_count = 100000")
    assert store.add_results(TOKEN, "batch_1", [long]).completed == 1


def test_a_network_file_system_gets_no_write_ahead_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, is_on_network, mode in (("a", False, "wal"), ("b", True, "delete")):
        monkeypatch.setattr(store_module, "is_on_network", lambda _, found=is_on_network: found)
        store = BatchStore(tmp_path / name)
        assert sqlite3.connect(tmp_path / name).execute("PRAGMA journal_mode").fetchone() == (mode,)
        del store


def test_a_database_of_another_release_is_refused(tmp_path: Path) -> None:
    BatchStore(tmp_path / "db")
    sqlite3.connect(tmp_path / "db").execute("PRAGMA user_version = 9")
    with pytest.raises(StoreError, match="version 9"):
        BatchStore(tmp_path / "db")


def test_a_database_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file"):
        BatchStore(tmp_path / "file" / "db")
    (tmp_path / "broken").write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        BatchStore(tmp_path / "broken")


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("24h", 86_400), ("1d", 86_400), ("30m", 1_800), ("25h", None), ("0h", None), ("1", None), ("", None)],
)
def test_completion_windows(written: str, seconds: int | None) -> None:
    assert window_s(written) == seconds


def test_no_tenant_occupies_all_places(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "db")
    for number in range(200):
        # The oldest have begun.
        status = "validating" if number else "in_progress"
        store.add_batch(batch(f"a{number}", owner="a", status=status))
    store.add_batch(batch("b0", owner="b"))
    store.add_batch(batch("b1", owner="b"))
    store.add_batch(batch("a999", owner="a", status="cancelling"))
    chosen = [record.id for record in store.runnable(50.0, 64)]
    assert len(chosen) == 64
    assert chosen[:4] == ["a999", "a0", "b0", "a1"]
    assert "b1" in chosen
    # Batches whose window has ended have nothing to submit.
    store.add_batch(batch("c7", owner="c", expires_at=50))
    assert [record.id for record in store.runnable(50.0, 64)][:2] == ["a999", "c7"]


def test_a_choice_among_many_open_batches_needs_little_memory(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "db")
    metadata = {str(number): "x" * 512 for number in range(16)}
    with store._transaction():
        for number in range(5_000):
            record = batch(f"b{number}", owner=f"o{number % 7}", metadata=metadata)
            store._db.execute(
                "INSERT INTO batches (id, owner, is_open, document) VALUES (?, ?, 1, ?)",
                (record.id, record.owner, msgspec.json.encode(record)),
            )
    tracemalloc.start()
    assert len(store.runnable(0.0, 64)) == 64
    assert store.uses("file-2") is None
    assert store.expired_files(1e10, 1e10) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
