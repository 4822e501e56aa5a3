"""The project's own experiments and documents."""

from pathlib import Path

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.common.rows import read_rows
from experiments.common.run_command import main
from experiments.common.tables_command import documents

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Catalogue()


def test_every_table_in_the_documents_matches_its_rows() -> None:
    stale = [str(one.path.relative_to(ROOT)) for one in documents(ROOT, CATALOGUE) if one.is_stale]
    assert stale == [], "run experiments/tables"


@pytest.mark.parametrize("name", CATALOGUE.names())
def test_an_experiment_has_all_its_parts(name: str) -> None:
    experiment = CATALOGUE.experiment(name)
    for quick in (False, True):
        assert isinstance(
            read_settings(CATALOGUE.config(name), experiment.settings, quick=quick), experiment.settings
        )
    assert CATALOGUE.tables(name)
    assert CATALOGUE.question(name).endswith(("?", "."))
    assert "What it cannot show" in (CATALOGUE.folder(name) / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CATALOGUE.names())
def test_the_rows_of_an_experiment_are_whole_and_make_every_table(name: str) -> None:
    rows = read_rows(CATALOGUE.results(name))
    if not rows:
        # Its tables cannot be in a document: the test above would fail.
        assert "There are no rows" in (CATALOGUE.folder(name) / "README.md").read_text(encoding="utf-8")
        return
    assert {row.experiment for row in rows} == {name}
    keys = [row.key for row in rows]
    assert all(keys.count(key) == 1 for key in keys)
    for table in CATALOGUE.tables(name).values():
        assert table.written(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOGUE.names())
def test_an_experiment_plays_its_quick_size(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if (missing := CATALOGUE.experiment(name).unavailable()) is not None:
        pytest.skip(missing)
    assert main([name, "--quick", "--jobs", "1"]) == 0
    printed = capsys.readouterr()
    for table in CATALOGUE.tables(name):
        assert f"{name}/{table}" in printed.out


def test_the_package_imports_no_experiment() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "serve_app").rglob("*.py")
        if any(
            line.startswith(("import experiments", "from experiments"))
            for line in path.read_text().splitlines()
        )
    ]
    assert wrong == [], "experiments are not installed with the package"
