"""Hypothesis profile for all tests, and shared fixtures."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

from serve_app.lab.workloads import catalog
from tests.parallel import Schedule, applications_first

# The time of an example depends on the machine's load.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    applications_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Schedule:
    return Schedule(config, log)


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
    monkeypatch.delenv(catalog.TRACES_VARIABLE, raising=False)
    monkeypatch.setattr(catalog, "DOWNLOAD_FOLDER", tmp_path / "none")
    monkeypatch.setattr(catalog, "_SHARED_FOLDER", tmp_path / "none")
