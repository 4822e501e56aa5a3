import json
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from serve_app.serving import state as state_store
from serve_app.serving.state import StateError, StateStore
from tests.serving.state.bucket import reached_by_this_process

DOCUMENT: Mapping[str, Any] = {
    "ratios": {"prose": 4.0000000001, "code": 1e-9, "großer Text": 3},
    "list": [1, 2.5, "x", None, True, {"deep": []}],
}


@pytest.fixture(params=["local", "memory", "object store", "bucket"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a folder that does not exist yet, on four kinds of file systems."""
    if request.param == "bucket":
        with reached_by_this_process(request.getfixturevalue("bucket")) as found:
            yield found
        return
    if request.param == "object store":
        monkeypatch.setattr(state_store, "_OBJECT_STORES", frozenset({"memory"}))
    yield str(tmp_path / "not" / "there") if request.param == "local" else f"memory://{tmp_path}/state"


def written(store: StateStore) -> Any:
    with fsspec.open(store.path, "rb") as file:
        return json.load(file)


def overwrite(store: StateStore, data: bytes) -> None:
    with fsspec.open(store.path, "wb") as file:
        file.write(data)


def files(uri: str) -> list[str]:
    system, path = fsspec.core.url_to_fs(uri)
    return sorted(name.rpartition("/")[2] for name in system.ls(path, detail=False))


def rejections(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "state_rejected" in record.getMessage()]


def test_saved_state_is_loaded_by_another_store(uri: str) -> None:
    store = StateStore(uri, "scheduler", "app/m")
    assert store.load() is None
    assert store.save(DOCUMENT)
    assert StateStore(uri, "scheduler", "app/m").load() == DOCUMENT
    store.save({"n": 2})
    assert StateStore(uri, "scheduler", "app/m").load() == {"n": 2}
    assert len(files(uri)) == 1, "no temporary file is left"


def test_the_same_is_not_written_again(uri: str) -> None:
    store = StateStore(uri, "scheduler", "m")
    assert store.save(DOCUMENT)
    assert not store.save(dict(reversed(list(DOCUMENT.items()))))
    later = StateStore(uri, "scheduler", "m")
    later.load()
    assert not later.save(DOCUMENT)
    assert later.save({"n": 1})


def test_each_learner_has_a_file_of_its_own(uri: str) -> None:
    named = [("scheduler", "a/b"), ("scheduler", "a-b"), ("scheduler", "a b"), ("tuner", "a/b")]
    for number, (kind, name) in enumerate(named):
        StateStore(uri, kind, name).save({"n": number})
    found = [StateStore(uri, kind, name).load() for kind, name in named]
    assert found == [{"n": number} for number in range(len(named))]


def test_a_file_states_what_it_holds(tmp_path: Path) -> None:
    store = StateStore(str(tmp_path), "scheduler", "app/demo")
    store.save({})
    envelope = written(store)
    assert (envelope["format"], envelope["version"]) == ("ewsjf-serve state", 1)
    assert (envelope["kind"], envelope["name"]) == ("scheduler", "app/demo")
    assert envelope["checksum"].startswith("sha256:")
    assert envelope["saved_at"].endswith("+00:00")
    assert Path(store.path).name.startswith("scheduler-app-demo-")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_set_aside(uri: str, share: float, caplog: pytest.LogCaptureFixture) -> None:
    store = StateStore(uri, "scheduler", "m")
    store.save(DOCUMENT)
    whole = json.dumps(written(store)).encode()
    overwrite(store, whole[: int(share * len(whole))])
    assert StateStore(uri, "scheduler", "m").load() is None
    assert len(rejections(caplog)) == 1
    assert "truncated" in rejections(caplog)[0]
    assert store.path in rejections(caplog)[0]
    assert "starting without it" in rejections(caplog)[0]
    # The next start finds nothing and can save again.
    assert StateStore(uri, "scheduler", "m").load() is None
    assert len(rejections(caplog)) == 1
    assert [name.endswith(".rejected") for name in files(uri)] == [True]
    StateStore(uri, "scheduler", "m").save(DOCUMENT)
    assert StateStore(uri, "scheduler", "m").load() == DOCUMENT


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "other"}, "name is 'other', expected 'm'"),
        ({"kind": "tuner"}, "kind is 'tuner', expected 'scheduler'"),
        ({"version": 2}, "version is 2, expected 1"),
        ({"version": None}, "version is None"),
        ({"format": "something"}, "not ewsjf-serve state"),
        ({"document": {"n": 2}}, "checksum is"),
        ({"document": [1]}, "document is missing"),
        ({"checksum": "sha256:0"}, "checksum is"),
    ],
)
def test_a_document_of_another_learner_or_an_altered_one_is_rejected(
    tmp_path: Path, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = StateStore(str(tmp_path), "scheduler", "m")
    store.save({"n": 1})
    overwrite(store, json.dumps(written(store) | changes).encode())
    assert StateStore(str(tmp_path), "scheduler", "m").load() is None
    assert reason in rejections(caplog)[0]
    assert files(str(tmp_path)) == [f"{Path(store.path).name}.rejected"]


@pytest.mark.parametrize("data", [b"[]", b"null", b"\xff\xfe", b'{"a":' * 100_000])
def test_anything_else_is_no_state(tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = StateStore(str(tmp_path), "scheduler", "m")
    overwrite(store, data)
    assert store.load() is None
    assert len(rejections(caplog)) == 1


def test_concurrent_writers_do_not_mix(uri: str) -> None:
    """Each document holds one number a thousand times; a reader always gets a complete document."""
    done = threading.Event()
    seen: list[Any] = []

    def write(number: int) -> None:
        store = StateStore(uri, "scheduler", "m")
        for turn in range(20):
            store.save({"numbers": [number] * 1_000, "turn": turn})

    def read() -> None:
        while not done.is_set():
            seen.append(StateStore(uri, "scheduler", "m").load())

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    StateStore(uri, "scheduler", "m").save({"numbers": [0] * 1_000})
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert seen
    assert all(document is not None and len(set(document["numbers"])) == 1 for document in seen)
    assert len(files(uri)) == 1


def test_an_unreachable_store_raises_with_its_path(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    store = StateStore(str(blocked / "below"), "scheduler", "m")
    with pytest.raises(StateError, match=r"cannot write .*/file/below/scheduler-m-"):
        store.save({"n": 1})
    with pytest.raises(StateError, match="cannot read nosuch://x/"):
        StateStore("nosuch://x", "scheduler", "m").load()
    with pytest.raises(StateError, match="cannot be written as JSON"):
        StateStore(str(tmp_path), "scheduler", "m").save({"n": object()})


def test_a_failed_write_leaves_the_old_document_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StateStore(str(tmp_path), "scheduler", "m")
    store.save({"n": 1})

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("fsspec.implementations.local.LocalFileSystem.mv", full)
        with pytest.raises(StateError, match="no space left"):
            store.save({"n": 2})
    assert store.load() == {"n": 1}
    assert files(str(tmp_path)) == [Path(store.path).name]
    assert store.save({"n": 2}), "a failed write is tried again"


def test_a_rejected_document_that_cannot_be_renamed_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = StateStore(str(tmp_path), "scheduler", "m")
    overwrite(store, b"{")

    def read_only(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.mv", read_only)
    assert store.load() is None
    assert any("state_rename_failed" in record.getMessage() for record in caplog.records)
