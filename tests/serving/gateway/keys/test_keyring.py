"""Keys, tenants and classes."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.errors import SettingsError
from serve_app.request import PriorityClass
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.keys.keyring import Keyring
from serve_app.serving.gateway.keys.settings import ApiKey


def test_without_keys_everyone_comes_in_and_names_its_tenant() -> None:
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


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer wrong", b"Basic k1", b"k1"])
def test_with_keys_only_they_come_in(header: bytes | None) -> None:
    with pytest.raises(RequestRefused) as caught:
        Keyring([ApiKey(tenant="a", key="k1")]).caller(header)
    assert caught.value.status == 401


def test_a_key_decides_whose_request_it_is() -> None:
    ring = Keyring([ApiKey(tenant="a", key="k1"), ApiKey(tenant="b", key="k2", may_act_for_tenants=True)])
    first, second = ring.caller(b"Bearer k1"), ring.caller(b"bearer k2")
    assert first.tenant(None, "anna") == "a"
    assert first.tenant(b"a", None) == "a"
    with pytest.raises(RequestRefused, match="may not act for tenant b"):
        first.tenant(b"b", None)
    assert second.tenant(b"c", None) == "c"
    assert second.tenant(None, "anna") == "b"


@pytest.mark.parametrize("name", [b"", b"a b", b"x" * 129, b"\xff", b"a\tb"])
def test_a_malformed_tenant_is_refused(name: bytes) -> None:
    with pytest.raises(RequestRefused, match="x-tenant"):
        Keyring(()).caller(None).tenant(name, None)


def test_a_key_may_be_held_to_some_classes() -> None:
    allowed = (PriorityClass.DEFAULT, PriorityClass.BATCH)
    ring = Keyring([ApiKey(tenant="a", key="k", default_class=PriorityClass.BATCH, allowed_classes=allowed)])
    caller = ring.caller(b"Bearer k")
    assert caller.default_class is PriorityClass.BATCH
    caller.check_class(PriorityClass.DEFAULT, "x-priority")
    with pytest.raises(RequestRefused, match=r"interactive .*it may use: default, batch"):
        caller.check_class(PriorityClass.INTERACTIVE, "x-priority")


def test_only_an_admin_may_look_at_everybody() -> None:
    ring = Keyring([ApiKey(tenant="a", key="k1"), ApiKey(tenant="ops", key="k2", admin=True)])
    with pytest.raises(RequestRefused, match="use one with admin: true") as caught:
        ring.caller(b"Bearer k1").check_admin()
    assert caught.value.status in {401, 403}
    ring.caller(b"Bearer k2").check_admin()


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
        ({"tenant": "a", "key": "k", "allowed_classes": ()}, "default_class"),
    ],
)
def test_impossible_keys_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
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
    with pytest.raises(SettingsError, match="given twice"):
        Keyring([ApiKey(tenant="a", key="k"), ApiKey(tenant="b", key="k")])


def test_without_keys_only_the_applications_own_key_makes_an_admin() -> None:
    ring = Keyring((), {"EWSJF_ADMIN_KEY": "own"})
    for header in (None, b"Bearer none", b"Bearer", b"Basic own"):
        caller = ring.caller(header)
        assert caller.tenant(None, "anna") == "anna"
        with pytest.raises(RequestRefused, match="admin: true") as caught:
            caller.check_admin()
        assert caught.value.status == 401
    ring.caller(b"Bearer own").check_admin()
    with pytest.raises(RequestRefused, match="EWSJF_ADMIN_KEY"):
        Keyring((), {}).caller(b"Bearer own").check_admin()


def test_the_applications_own_key_is_an_admins_beside_others() -> None:
    ring = Keyring([ApiKey(tenant="a", key="k")], {"EWSJF_ADMIN_KEY": "own"})
    ring.caller(b"Bearer own").check_admin()
    with pytest.raises(RequestRefused, match="not known"):
        ring.caller(b"Bearer other")
