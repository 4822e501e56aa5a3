"""Hypothesis profile for all tests, the stage of each test, and shared fixtures."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import hypothesis
import pytest

from serve_app.lab import workloads

# The time of an example depends on the machine's load.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

# Fixtures that start programs; other tests that start some have the mark in their module.
_STARTS_PROGRAMS = {"browser", "bucket"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files with the name in `-k test_name`: importing all of them takes 15 s."""
    name = config.option.keyword.lower()
    if not re.fullmatch(r"test_\w+", name) or not collection_path.is_file():
        return None
    is_named = name in collection_path.name.lower() or name in collection_path.read_text().lower()
    return None if is_named else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of served applications, of pages in a browser, and of a bucket."""
    for item in items:
        if item.nodeid.startswith("tests/e2e/") or _STARTS_PROGRAMS & set(getattr(item, "fixturenames", ())):
            item.add_marker("application")


@pytest.fixture(autouse=True, scope="session")
def certificates_read_once() -> Iterator[None]:
    """Read the machine's certificates once: every httpx client would take 27 ms of CPU time for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context)
        )
        yield


@pytest.fixture(autouse=True, scope="session")
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the batches of applications out of the user's state folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def no_trace_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Point the usual trace folders at an empty one."""
    monkeypatch.delenv(workloads.TRACES_VARIABLE, raising=False)
    monkeypatch.setattr(workloads, "DOWNLOAD_FOLDER", tmp_path / "none")
    monkeypatch.setattr(workloads, "_SHARED_FOLDER", tmp_path / "none")
