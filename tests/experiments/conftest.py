import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.common.catalogue import Catalogue
from tests.experiments.builders import write_package
from tests.lab.conftest import load_1_is_measured_on_few_requests

__all__ = ["catalogue", "load_1_is_measured_on_few_requests"]

PACKAGE = "coin_experiments"


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalogue]:
    """Yield a catalogue with one experiment, which flips coins."""
    write_package(tmp_path, PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield Catalogue(PACKAGE)
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
