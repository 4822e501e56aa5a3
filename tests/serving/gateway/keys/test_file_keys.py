"""Keys of a file at a gateway, and what happens when the file changes."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from serve_app.api_keys.file import KeysFileError, changed_keys
from serve_app.request import PriorityClass
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.keys.file_keys import FileKeys
from serve_app.serving.gateway.keys.keyring import Keyring
from serve_app.serving.gateway.keys.settings import ApiKey
from tests.api_keys.test_file import record

MakeFileKeys = Callable[[Path], FileKeys]


@pytest.fixture
def watched() -> Iterator[MakeFileKeys]:
    made: list[FileKeys] = []

    def make(path: Path) -> FileKeys:
        made.append(FileKeys(path, poll_s=0.01))
        return made[-1]

    yield make
    for keys in made:
        keys.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def test_a_key_brings_what_it_allows(tmp_path: Path, watched: MakeFileKeys) -> None:
    path = tmp_path / "keys.json"
    found, secret = record(tenant="a", highest_class=PriorityClass.BATCH, models=("m",), weight=2.0)
    changed_keys(path, lambda _: [found])
    caller = watched(path).caller(secret.encode())
    assert caller is not None
    assert caller.tenant(None, None) == "a"
    assert caller.default_class is PriorityClass.BATCH
    assert (caller.may_use("m"), caller.may_use("n")) == (True, False)
    terms = caller.terms("a")
    assert terms is not None
    assert (terms.key_id, terms.weight) == (found.id, 2.0)
    # The weight is the tenant's own; limits go with the key.
    other = caller.terms("another")
    assert other is not None
    assert (other.key_id, other.weight) == (found.id, None)


def test_a_wrong_secret_with_a_known_id_is_nobodys(tmp_path: Path, watched: MakeFileKeys) -> None:
    path = tmp_path / "keys.json"
    found, secret = record()
    changed_keys(path, lambda _: [found])
    keys = watched(path)
    assert keys.caller(secret.encode()[:-2] + b"xx") is None
    assert keys.caller(f"ewsjf_{found.id}_".encode()) is None
    assert keys.caller(b"sk-anything") is None


@pytest.mark.parametrize(("field", "words"), [("expires_at", "has expired"), ("revoked_at", "was revoked")])
def test_an_ended_key_is_refused_with_its_reason(
    tmp_path: Path, watched: MakeFileKeys, field: str, words: str
) -> None:
    path = tmp_path / "keys.json"
    found, secret = record(**{field: datetime.now(UTC) - timedelta(seconds=1)})
    changed_keys(path, lambda _: [found])
    keys = watched(path)
    with pytest.raises(RequestRefused, match=words) as caught:
        keys.caller(secret.encode())
    assert caught.value.status == 401
    # Who has not the whole secret learns nothing of the key.
    assert keys.caller(secret.encode()[:-2] + b"xx") is None


def test_a_changed_file_is_read_again_and_a_revoked_key_ends(tmp_path: Path, watched: MakeFileKeys) -> None:
    path = tmp_path / "keys.json"
    first, secret = record()
    changed_keys(path, lambda _: [first])
    keys = watched(path)
    assert keys.caller(secret.encode()) is not None
    second, second_secret = record()
    changed_keys(path, lambda known: [*known, second])
    until(lambda: keys.caller(second_secret.encode()))
    changed_keys(path, lambda known: known[1:])
    until(lambda: keys.caller(secret.encode()) is None)


def test_a_broken_file_keeps_the_keys_of_before_and_names_the_mistake(
    tmp_path: Path, watched: MakeFileKeys, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    found, secret = record()
    changed_keys(path, lambda _: [found])
    good = path.read_text()
    logging.getLogger("ray.serve").propagate = True
    keys = watched(path)
    path.write_text(good.replace('"tenant"', '"tennant"'))
    until(lambda: "tennant" in caplog.text)
    assert "$.keys[0]" in caplog.text
    assert "keys_file_broken" in caplog.text
    assert keys.caller(secret.encode()) is not None
    path.unlink()
    until(lambda: "cannot be read" in caplog.text)
    assert keys.caller(secret.encode()) is not None
    changed_keys(path, lambda _: [])
    until(lambda: keys.caller(secret.encode()) is None)


def test_a_file_that_is_exchanged_by_its_link_is_noticed(tmp_path: Path, watched: MakeFileKeys) -> None:
    """As Kubernetes does with mounted secrets: same path, same size, same age."""
    first, secret = record()
    second, second_secret = record()
    for name, each in (("one", first), ("two", second)):
        changed_keys(tmp_path / name, lambda _, each=each: [each])  # type: ignore[misc]
        os.utime(tmp_path / name, (1e9, 1e9))
    link = tmp_path / "keys.json"
    link.symlink_to(tmp_path / "one")
    keys = watched(link)
    (tmp_path / "new").symlink_to(tmp_path / "two")
    (tmp_path / "new").replace(link)
    until(lambda: keys.caller(second_secret.encode()))
    assert keys.caller(secret.encode()) is None


def test_a_file_that_is_broken_at_the_start_stops_it(tmp_path: Path, watched: MakeFileKeys) -> None:
    with pytest.raises(KeysFileError, match="cannot be read"):
        watched(tmp_path / "none.json")


def test_keys_of_the_configuration_hold_beside_those_of_the_file(
    tmp_path: Path, watched: MakeFileKeys
) -> None:
    path = tmp_path / "keys.json"
    found, secret = record(tenant="of-file")
    changed_keys(path, lambda _: [found])
    ring = Keyring([ApiKey(tenant="written", key="k1")], {}, watched(path))
    assert ring.caller(b"Bearer " + secret.encode()).tenant(None, None) == "of-file"
    assert ring.caller(b"Bearer k1").tenant(None, None) == "written"
    with pytest.raises(RequestRefused, match="is not known here"):
        ring.caller(b"Bearer k2")


def test_an_empty_file_lets_nobody_in(tmp_path: Path, watched: MakeFileKeys) -> None:
    path = tmp_path / "keys.json"
    changed_keys(path, lambda _: [])
    with pytest.raises(RequestRefused, match="an API key is needed"):
        Keyring([], {}, watched(path)).caller(None)
