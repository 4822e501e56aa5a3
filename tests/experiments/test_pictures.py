"""Pictures of the documents that are generated from rows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from experiments.batch import chart
from experiments.common.catalogue import Catalogue
from experiments.common.rows import Row, read_rows
from experiments.defaults import map as defaults_map


@pytest.mark.parametrize(
    ("name", "path", "picture"),
    [
        ("defaults", defaults_map.PICTURE, defaults_map.picture),
        ("batch", chart.PICTURE, chart.picture),
    ],
)
def test_a_picture_matches_its_rows(name: str, path: Path, picture: Callable[[Sequence[Row]], str]) -> None:
    drawn = picture(read_rows(Catalogue().results(name)))
    ET.fromstring(drawn)
    assert path.read_text(encoding="utf-8") == drawn, f"run python -m {picture.__module__}"
