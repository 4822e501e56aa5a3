"""Keys from the configuration and from a file, tenants and classes."""

import logging
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from serve_app.errors import SettingsError
from serve_app.request import PriorityClass
from serve_app.serving.api_keys import KeysFileError, changed_keys
from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.keys import ApiKey, Caller, Keyring
from tests.e2e.served import wait_for
from tests.serving.test_api_keys import record

PLAIN = ApiKey(tenant="a", key="k1")
ACTING = ApiKey(tenant="a", key="k2", may_act_for_tenants=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a file without keys."""
    changed_keys(tmp_path / "keys.json", lambda _: ())
    return tmp_path / "keys.json"


@pytest.fixture
def keyring(path: Path) -> Iterator[Keyring]:
    """Return the keyring of the file."""
    made = Keyring((), {}, path, poll_s=0.01)
    yield made
    made.close()


def caller(keyring: Keyring, secret: str) -> Caller:
    return keyring.caller(b"Bearer " + secret.encode())


def is_known(keyring: Keyring, secret: str) -> bool:
    try:
        caller(keyring, secret)
    except RequestRejected as rejection:
        return "unknown API key" not in str(rejection)
    return True


def add(path: Path, keyring: Keyring, **fields: Any) -> tuple[str, str]:
    """Add a key to the file, and return its id and its secret once the keyring has read it."""
    found, secret = record(**fields)
    changed_keys(path, lambda keys: [*keys, found])
    wait_for(lambda: is_known(keyring, secret), 30, "the file is read")
    return found.id, secret


def test_a_key_of_a_file_carries_its_terms(path: Path, keyring: Keyring) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    fields: dict[str, Any] = {"tenant": "a", "highest_class": PriorityClass.BATCH, "models": ("m",)}
    fields |= {"weight": 2.0, "floor_tokens_per_s": 30.0}
    key_id, secret = add(path, keyring, **fields, expires_at=tomorrow, revoked_at=tomorrow)
    found = caller(keyring, secret)
    assert found == keyring.caller_with(key_id)
    assert found.tenant(None, None) == "a"
    assert found.default_class is PriorityClass.BATCH
    assert (found.may_use("m"), found.may_use("n")) == (True, False)
    # Weight and floor belong to the tenant; limits belong to the key.
    for tenant, weight, floor in (("a", 2.0, 30.0), ("another", None, None)):
        terms = found.terms(tenant)
        assert terms is not None
        assert (terms.key_id, terms.weight, terms.floor_tokens_per_s) == (key_id, weight, floor)
    for wrong in (secret[:-2] + "xx", f"ewsjf_{key_id}_", "sk-anything"):
        assert not is_known(keyring, wrong)


@pytest.mark.parametrize(("field", "words"), [("expires_at", "has expired"), ("revoked_at", "was revoked")])
def test_an_ended_key_is_rejected_with_its_reason(
    path: Path, keyring: Keyring, field: str, words: str
) -> None:
    ended_at = datetime.now(UTC) - timedelta(seconds=1)
    key_id, secret = add(path, keyring, **{field: ended_at})
    reason = rf"{words} \({ended_at:%Y-%m-%d %H:%M} UTC\)"
    with pytest.raises(RequestRejected, match=reason) as caught:
        caller(keyring, secret)
    assert caught.value.status == 401
    with pytest.raises(RequestRejected, match=reason):
        keyring.caller_with(key_id)
    # Part of a secret reveals nothing about the key.
    assert not is_known(keyring, secret[:-2] + "xx")


def test_a_file_is_reloaded_and_an_invalid_one_leaves_the_previous_keys(
    path: Path, keyring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("ray.serve").propagate = True
    (_, first), (_, second) = add(path, keyring), add(path, keyring)
    text = path.read_text()
    path.write_text(text.replace('"tenant"', '"tennant"'))
    wait_for(lambda: "tennant" in caplog.text, 30, "the file is read")
    for words in ("keys_file_invalid", "$.keys[0]", "the current 2 keys stay in effect"):
        assert words in caplog.text
    path.unlink()
    wait_for(lambda: "cannot be read" in caplog.text, 30, "the file is read")
    assert is_known(keyring, first)
    path.write_text(text)
    changed_keys(path, lambda keys: keys[1:])
    wait_for(lambda: not is_known(keyring, first), 30, "the file is read")
    assert is_known(keyring, second)


def test_a_file_that_is_exchanged_by_its_link_is_noticed(tmp_path: Path, path: Path) -> None:
    """Kubernetes replaces mounted secrets this way: same path, size and age."""
    (first, _), (second, secret) = record(), record()
    for name, each in (("one", first), ("two", second)):
        changed_keys(tmp_path / name, lambda _, each=each: [each])  # type: ignore[misc]
        os.utime(tmp_path / name, (1e9, 1e9))
        (tmp_path / f"to {name}").symlink_to(tmp_path / name)
    (tmp_path / "to one").replace(path)
    keyring = Keyring((), {}, path, poll_s=0.01)
    (tmp_path / "to two").replace(path)
    wait_for(lambda: is_known(keyring, secret), 30, "the file is read")
    keyring.close()


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match="cannot be read"):
        Keyring((), {}, tmp_path / "keys.json")


def test_an_empty_file_admits_no_client(keyring: Keyring) -> None:
    with pytest.raises(RequestRejected, match="an API key is required"):
        keyring.caller(None)


@pytest.mark.parametrize(
    ("keys", "header", "user", "tenant"),
    [
        ([], None, None, "default"),
        ([], None, "anna", "anna"),
        ([], b"acme", "anna", "acme"),
        # The digest of a name that is not a valid tenant.
        ([], None, "Anna Müller", "user-94666c8824a80401"),
        ([], None, "x" * 129, "user-0ec9eb33e74510bc"),
        ([PLAIN], None, "anna", "a"),
        ([PLAIN], b"a", None, "a"),
        ([ACTING], None, "anna", "a"),
        ([ACTING], b"c", "anna", "c"),
    ],
)
def test_the_tenant_of_a_request(
    keys: Sequence[ApiKey], header: bytes | None, user: str | None, tenant: str
) -> None:
    authorization = f"bearer {keys[0].key} ".encode() if keys else None
    assert Keyring(keys, {}).caller(authorization).tenant(header, user) == tenant


@pytest.mark.parametrize("name", [b"", b"a b", b"x" * 129, b"\xff", b"a\tb"])
def test_a_malformed_tenant_is_rejected(name: bytes) -> None:
    with pytest.raises(RequestRejected, match="x-tenant"):
        Keyring(()).caller(None).tenant(name, None)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "an API key is required"),
        (b"", "an API key is required"),
        (b"Basic k1", "an API key is required"),
        (b"k1", "an API key is required"),
        (b"Bearer", "unknown API key"),
        (b"Bearer wrong", "unknown API key"),
    ],
)
def test_with_keys_other_callers_get_401(header: bytes | None, words: str) -> None:
    with pytest.raises(RequestRejected, match=words) as caught:
        Keyring([PLAIN]).caller(header)
    assert caught.value.status == 401


def test_secrets_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    keys = [ApiKey(tenant="a", env="THE_KEY"), ApiKey(tenant="b", file=str(tmp_path / "key"))]
    keyring = Keyring(keys, {"THE_KEY": "from-env"})
    assert [caller(keyring, f"from-{place}").tenant(None, None) for place in ("env", "file")] == ["a", "b"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([ApiKey(tenant="a", env="NOT_SET")], "environment variable NOT_SET"),
        ([ApiKey(tenant="a", file="/does/not/exist")], "cannot be read from /does/not/exist"),
        ([PLAIN, ApiKey(tenant="b", key="k1")], "the key of tenant b occurs twice"),
    ],
)
def test_a_missing_or_repeated_secret_stops_the_start(keys: Sequence[ApiKey], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Keyring(keys, {})


def test_a_secret_is_not_shown() -> None:
    assert "k1" not in repr(PLAIN)
    assert "k1" not in repr(Keyring([PLAIN]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tenant": "a"}, "exactly one of key, env, file; got none"),
        ({"tenant": "a", "key": "k", "env": "E"}, "got key and env"),
        ({"tenant": "", "key": "k"}, "tenant"),
        (
            {
                "tenant": "a",
                "key": "k",
                "highest_class": PriorityClass.BATCH,
                "default_class": PriorityClass.DEFAULT,
            },
            "default_class default is above highest_class batch",
        ),
    ],
)
def test_impossible_keys_are_rejected_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        ApiKey(**fields)


def test_without_keys_only_the_applications_own_key_makes_an_admin() -> None:
    own = Keyring((), {"EWSJF_ADMIN_KEY": "own"})
    for header in (None, b"Bearer none", b"Bearer", b"Basic own"):
        found = own.caller(header)
        assert found.tenant(None, "anna") == "anna"
        assert found.default_class is PriorityClass.DEFAULT
        with pytest.raises(RequestRejected, match="admin: true") as caught:
            found.check_admin()
        assert caught.value.status == 401
    caller(own, "own").check_admin()
    with pytest.raises(RequestRejected, match="EWSJF_ADMIN_KEY"):
        caller(Keyring((), {}), "own").check_admin()


def test_a_request_from_within_has_the_caller_of_its_key() -> None:
    for keys in ([PLAIN, ACTING], [ACTING, PLAIN]):
        keyring = Keyring(keys)
        assert keyring.caller_with("config/a").may_act_for_tenants
        assert keyring.caller_with("") == Caller()
        with pytest.raises(RequestRejected, match="no longer exists"):
            keyring.caller_with("config/b")
