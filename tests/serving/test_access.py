"""Admin key of an application on this machine."""

import resource
from pathlib import Path

import pytest

from serve_app.serving.access import (
    admin_key_of,
    max_connections,
    read_admin_key,
    write_admin_key,
    write_ray_token,
)


def test_each_start_has_a_key_that_only_its_user_can_read(tmp_path: Path) -> None:
    assert read_admin_key(tmp_path) is None
    first = write_admin_key(tmp_path, {})
    assert read_admin_key(tmp_path) == first
    assert (tmp_path / "admin-key").stat().st_mode & 0o777 == 0o600
    assert len(first) >= 40
    assert write_admin_key(tmp_path, {}) != first


def test_a_key_of_the_environment_counts(tmp_path: Path) -> None:
    assert write_admin_key(tmp_path, {"EWSJF_ADMIN_KEY": " mine\n"}) == "mine"
    assert read_admin_key(tmp_path) == "mine"
    assert admin_key_of({}) == ""


def test_rays_token_is_in_the_folder_unless_the_user_has_one(tmp_path: Path) -> None:
    (variable, path), *more = write_ray_token(tmp_path, {}).items()
    assert (variable, Path(path).parent, more) == ("RAY_AUTH_TOKEN_PATH", tmp_path, [])
    first = Path(path).read_text()
    assert len(first) == 64
    assert Path(path).stat().st_mode & 0o077 == 0
    write_ray_token(tmp_path, {})
    assert Path(path).read_text() != first
    assert write_ray_token(tmp_path, {"RAY_AUTH_TOKEN": "mine"}) == {}
    assert write_ray_token(tmp_path, {"RAY_AUTH_TOKEN_PATH": "/mine"}) == {}


def test_a_gateway_has_half_as_many_more_files_as_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (15_000, 30_000))
    assert max_connections() == 10_000
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert max_connections() == 20_000
