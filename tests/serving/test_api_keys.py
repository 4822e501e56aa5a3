"""API key files."""

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from serve_app.request import PriorityClass
from serve_app.serving.api_keys import (
    KeyRecord,
    KeysFileError,
    change_key,
    changed_keys,
    hashed,
    id_of,
    is_secret_of,
    new_secret,
    parsed_hash,
    read_keys,
    revoke_key,
)

NOW = datetime(2026, 1, 31, tzinfo=UTC)


def record(**changes: Any) -> tuple[KeyRecord, str]:
    key_id, secret = new_secret()
    fields = {"id": key_id, "hash": hashed(secret), "tenant": "t", "created_at": NOW, **changes}
    return KeyRecord(**fields), secret


def test_a_secret_is_found_by_its_id_and_known_by_its_hash() -> None:
    found, secret = record()
    salt, digest = parsed_hash(found.hash)
    assert id_of(secret.encode()) == found.id
    assert is_secret_of(secret.encode(), salt, digest)
    assert not is_secret_of(secret.encode()[:-1], salt, digest)
    assert hashed(secret) != found.hash
    assert len({new_secret()[1] for _ in range(100)}) == 100


@pytest.mark.parametrize("secret", [b"", b"ewsjf", b"ewsjf_abc", b"sk-abc_def_ghi", b"_abc_def"])
def test_other_secrets_have_no_id(secret: bytes) -> None:
    assert id_of(secret) is None


def test_a_written_file_is_read_back_and_contains_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "keys.json"
    first, secret = record(models=("a", "b"), requests_per_minute=60, expires_at=NOW)
    second, _ = record(admin=True, weight=2.5, highest_class=PriorityClass.BATCH)
    changed_keys(path, lambda keys: [*keys, first])
    changed_keys(path, lambda keys: [*keys, second])
    assert read_keys(path) == (first, second)
    assert secret not in path.read_text()
    assert secret.rpartition("_")[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["keys.json"]


def test_a_failed_change_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    changed_keys(path, lambda _: [record()[0]])
    before = path.read_bytes()

    def fail(_: object) -> list[KeyRecord]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        changed_keys(path, fail)
    assert path.read_bytes() == before


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(target)
    changed_keys(link, lambda _: [record()[0]])
    assert link.is_symlink()
    assert len(read_keys(target)) == 1


def test_no_writer_undoes_what_another_wrote_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as pool:
        for _ in range(24):
            pool.submit(changed_keys, path, lambda keys: [*keys, record()[0]])
    assert len(read_keys(path)) == 24


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"concurrent": "many"}, r"Expected `int \| null`, got `str` - at `\$.keys\[1\].concurrent`"),
        ({"queued": 0}, r">= 1 - at `\$.keys\[1\].queued`"),
        ({"requests_per_minut": 5}, r"unknown field `requests_per_minut` - at `\$.keys\[1\]`"),
        ({"weight": -1.0}, r">= 1e-06.* - at `\$.keys\[1\].weight`"),
        ({"weight": 1e300}, r"<= 1000000.* - at `\$.keys\[1\].weight`"),
        ({"tenant": "a b"}, r"tenant must be .* - at `\$.keys\[1\]`"),
        ({"hash": "md5:00:00"}, r"a hash has the form .* - at `\$.keys\[1\]`"),
        ({"expires_at": "2026-01-31T00:00:00"}, r"timezone.* - at `\$.keys\[1\].expires_at`"),
        ({"id": "first"}, r"has the key first twice, the second at `\$.keys\[1\]`"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, change: dict[str, Any], place: str) -> None:
    path = tmp_path / "keys.json"
    changed_keys(path, lambda _: [record(id="first")[0], record()[0]])
    document = json.loads(path.read_text())
    document["keys"][1] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(KeysFileError, match=place):
        read_keys(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "x", "version": 1, "keys": []}', "\xff"])
def test_an_invalid_key_file_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(KeysFileError, match=r"keys\.json"):
        read_keys(path)


def test_a_key_ends_when_it_expires_or_is_revoked() -> None:
    later = NOW + timedelta(seconds=1)
    assert record(expires_at=later)[0].status(NOW) == "valid"
    assert record(expires_at=NOW)[0].status(NOW) == "expired"
    assert record(expires_at=later, revoked_at=NOW)[0].status(NOW) == "revoked"


def test_the_highest_class_includes_all_below_it() -> None:
    assert record(highest_class=PriorityClass.DEFAULT)[0].classes == (
        PriorityClass.DEFAULT,
        PriorityClass.BATCH,
    )


def test_a_second_revocation_keeps_the_time_of_the_first(tmp_path: Path) -> None:
    kept, _ = record(revoked_at=NOW)
    changed_keys(tmp_path / "keys.json", lambda _: [kept])
    assert revoke_key(tmp_path / "keys.json", kept.id).revoked_at == NOW
    assert change_key(tmp_path / "keys.json", kept.id, name="old").revoked_at == NOW
