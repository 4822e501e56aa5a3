"""Keys from the configuration and from a file, tenants and classes."""

import logging
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from serve_app.errors import SettingsError
from serve_app.request import PriorityClass
from serve_app.serving.api_keys import KeyRecord, KeysFileError, changed_keys
from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.keys import ApiKey, Caller, Keyring
from tests.e2e.served import wait_for
from tests.serving.test_api_keys import record

MakeKeyring = Callable[..., Keyring]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def watched(path: Path) -> Iterator[MakeKeyring]:
    """Return a function that writes keys to the file, and watches it."""
    made: list[Keyring] = []

    def make(*records: KeyRecord) -> Keyring:
        changed_keys(path, lambda _: [*records])
        made.append(Keyring((), {}, path, poll_s=0.01))
        return made[-1]

    yield make
    for keys in made:
        keys.close()


def is_known(keys: Keyring, secret: str) -> bool:
    """Return whether a secret identifies a caller. A key that has ended raises."""
    try:
        keys.caller(b"Bearer " + secret.encode())
    except RequestRejected as rejection:
        if "unknown API key" not in str(rejection):
            raise
        return False
    return True


def test_a_key_carries_its_terms(watched: MakeKeyring) -> None:
    found, secret = record(tenant="a", highest_class=PriorityClass.BATCH, models=("m",), weight=2.0)
    caller = watched(found).caller(b"Bearer " + secret.encode())
    assert caller.tenant(None, None) == "a"
    assert caller.default_class is PriorityClass.BATCH
    assert (caller.may_use("m"), caller.may_use("n")) == (True, False)
    terms = caller.terms("a")
    assert terms is not None
    assert (terms.key_id, terms.weight) == (found.id, 2.0)
    # The weight belongs to the tenant; limits belong to the key.
    other = caller.terms("another")
    assert other is not None
    assert (other.key_id, other.weight) == (found.id, None)


def test_a_wrong_secret_with_a_known_id_is_not_authenticated(watched: MakeKeyring) -> None:
    found, secret = record()
    keys = watched(found)
    assert not is_known(keys, secret[:-2] + "xx")
    assert not is_known(keys, f"ewsjf_{found.id}_")
    assert not is_known(keys, "sk-anything")


@pytest.mark.parametrize(("field", "words"), [("expires_at", "has expired"), ("revoked_at", "was revoked")])
def test_an_ended_key_is_rejected_with_its_reason(watched: MakeKeyring, field: str, words: str) -> None:
    found, secret = record(**{field: datetime.now(UTC) - timedelta(seconds=1)})
    keys = watched(found)
    with pytest.raises(RequestRejected, match=words) as caught:
        is_known(keys, secret)
    assert caught.value.status == 401
    # Part of a secret reveals nothing about the key.
    assert not is_known(keys, secret[:-2] + "xx")


def test_a_changed_file_is_read_again_and_a_revoked_key_ends(path: Path, watched: MakeKeyring) -> None:
    first, secret = record()
    keys = watched(first)
    assert is_known(keys, secret)
    second, second_secret = record()
    changed_keys(path, lambda known: [*known, second])
    wait_for(lambda: is_known(keys, second_secret), 30, "the file is read")
    changed_keys(path, lambda known: known[1:])
    wait_for(lambda: not is_known(keys, secret), 30, "the file is read")


def test_a_broken_file_leaves_the_previous_keys_and_names_the_mistake(
    path: Path, watched: MakeKeyring, caplog: pytest.LogCaptureFixture
) -> None:
    found, secret = record()
    logging.getLogger("ray.serve").propagate = True
    keys = watched(found)
    path.write_text(path.read_text().replace('"tenant"', '"tennant"'))
    wait_for(lambda: "tennant" in caplog.text, 30, "the file is read")
    assert "$.keys[0]" in caplog.text
    assert "keys_file_invalid" in caplog.text
    assert is_known(keys, secret)
    path.unlink()
    wait_for(lambda: "cannot be read" in caplog.text, 30, "the file is read")
    assert is_known(keys, secret)
    changed_keys(path, lambda _: [])
    wait_for(lambda: not is_known(keys, secret), 30, "the file is read")


def test_a_file_that_is_exchanged_by_its_link_is_noticed(tmp_path: Path) -> None:
    """Kubernetes replaces mounted secrets this way: same path, size and age."""
    first, secret = record()
    second, second_secret = record()
    for name, each in (("one", first), ("two", second)):
        changed_keys(tmp_path / name, lambda _, each=each: [each])  # type: ignore[misc]
        os.utime(tmp_path / name, (1e9, 1e9))
    link = tmp_path / "keys.json"
    link.symlink_to(tmp_path / "one")
    keys = Keyring((), {}, link, poll_s=0.01)
    (tmp_path / "new").symlink_to(tmp_path / "two")
    (tmp_path / "new").replace(link)
    wait_for(lambda: is_known(keys, second_secret), 30, "the file is read")
    assert not is_known(keys, secret)
    keys.close()


def test_a_file_that_is_broken_at_the_start_stops_it(path: Path) -> None:
    with pytest.raises(KeysFileError, match="cannot be read"):
        Keyring((), {}, path)


def test_an_empty_file_admits_no_client(watched: MakeKeyring) -> None:
    with pytest.raises(RequestRejected, match="an API key is required"):
        watched().caller(None)


def test_without_keys_every_client_is_accepted_and_names_its_tenant() -> None:
    caller = Keyring(()).caller(None)
    assert caller.tenant(None, None) == "default"
    assert caller.tenant(b"acme", "anna") == "acme"
    assert caller.tenant(None, "anna") == "anna"
    assert caller.default_class is PriorityClass.DEFAULT


def test_an_end_user_with_an_unfit_name_is_known_by_its_digest() -> None:
    caller = Keyring(()).caller(None)
    assert caller.tenant(None, "Anna Müller") == caller.tenant(None, "Anna Müller")
    assert caller.tenant(None, "Anna Müller") != caller.tenant(None, "x" * 500)
    assert caller.tenant(None, "x" * 500).startswith("user-")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "an API key is required"),
        (b"", None),
        (b"Bearer", None),
        (b"Bearer wrong", "unknown API key"),
        (b"Basic k1", None),
        (b"k1", None),
    ],
)
def test_with_keys_other_callers_get_401(header: bytes | None, words: str | None) -> None:
    with pytest.raises(RequestRejected, match=words) as caught:
        Keyring([ApiKey(tenant="a", key="k1")]).caller(header)
    assert caught.value.status == 401


def test_a_key_decides_whose_request_it_is() -> None:
    ring = Keyring([ApiKey(tenant="a", key="k1"), ApiKey(tenant="b", key="k2", may_act_for_tenants=True)])
    first, second = ring.caller(b"Bearer k1"), ring.caller(b"bearer k2")
    assert first.tenant(None, "anna") == "a"
    assert first.tenant(b"a", None) == "a"
    with pytest.raises(RequestRejected, match="may not act for tenant b"):
        first.tenant(b"b", None)
    assert second.tenant(b"c", None) == "c"
    assert second.tenant(None, "anna") == "b"


@pytest.mark.parametrize("name", [b"", b"a b", b"x" * 129, b"\xff", b"a\tb"])
def test_a_malformed_tenant_is_rejected(name: bytes) -> None:
    with pytest.raises(RequestRejected, match="x-tenant"):
        Keyring(()).caller(None).tenant(name, None)


def test_secrets_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("from-file\n")
    keys = [ApiKey(tenant="a", env="THE_KEY"), ApiKey(tenant="b", file=str(path))]
    ring = Keyring(keys, {"THE_KEY": "from-env"})
    assert ring.caller(b"Bearer from-env").tenant(None, None) == "a"
    assert ring.caller(b"Bearer from-file").tenant(None, None) == "b"


def test_a_secret_is_not_shown() -> None:
    key = ApiKey(tenant="a", key="k-secret")
    assert "k-secret" not in repr(key)
    assert "k-secret" not in repr(Keyring([key]))


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


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (ApiKey(tenant="a", env="NOT_SET"), "environment variable NOT_SET"),
        (ApiKey(tenant="a", file="/does/not/exist"), "cannot be read from /does/not/exist"),
    ],
)
def test_a_missing_secret_stops_the_start(key: ApiKey, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Keyring([key], {})


def test_one_secret_for_two_tenants_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="occurs twice"):
        Keyring([ApiKey(tenant="a", key="k"), ApiKey(tenant="b", key="k")])


def test_without_keys_only_the_applications_own_key_makes_an_admin() -> None:
    ring = Keyring((), {"EWSJF_ADMIN_KEY": "own"})
    for header in (None, b"Bearer none", b"Bearer", b"Basic own"):
        caller = ring.caller(header)
        assert caller.tenant(None, "anna") == "anna"
        with pytest.raises(RequestRejected, match="admin: true") as caught:
            caller.check_admin()
        assert caught.value.status == 401
    ring.caller(b"Bearer own").check_admin()
    with pytest.raises(RequestRejected, match="EWSJF_ADMIN_KEY"):
        Keyring((), {}).caller(b"Bearer own").check_admin()


def test_a_request_from_within_has_the_caller_of_its_key() -> None:
    plain, acting = ApiKey(tenant="a", key="k1"), ApiKey(tenant="a", key="k2", may_act_for_tenants=True)
    for keys in ([plain, acting], [acting, plain]):
        ring = Keyring(keys)
        assert ring.caller_with("config/a").may_act_for_tenants
        assert ring.caller_with("") == Caller()
        with pytest.raises(RequestRejected, match="no longer exists"):
            ring.caller_with("config/b")
