"""One profile of hypothesis for all tests, and fixtures that several packages use."""

from pathlib import Path

import hypothesis
import pytest

from serve_app.workloads import catalog

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture
def no_trace_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The usual folders of trace files are empty."""
    monkeypatch.delenv(catalog.TRACES_VARIABLE, raising=False)
    monkeypatch.setattr(catalog, "DOWNLOAD_FOLDER", tmp_path / "none")
    monkeypatch.setattr(catalog, "_SHARED_FOLDER", tmp_path / "none")
