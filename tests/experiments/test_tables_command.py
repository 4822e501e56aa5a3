"""`experiments/tables`: documents follow their rows."""

from pathlib import Path

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.rows import write_rows
from experiments.common.tables_command import main
from tests.experiments.builders import row

DOCUMENT = "# Coins\n\n<!-- table: coin/shares -->\nold\n<!-- end table -->\nAfter.\n"
OUT_OF_DATE, IN_DATE = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]


@pytest.fixture
def page(catalogue: Catalogue) -> Path:
    """Return a document beside the experiments."""
    root = catalogue.root.parent
    page = root / "docs" / "deep" / "results.md"
    page.parent.mkdir(parents=True)
    page.write_text(DOCUMENT)
    write_rows(catalogue.results("coin"), [row({"bias": 0.5}, {"share": IN_DATE})])
    return page


def test_a_table_is_written_from_its_rows_and_the_rest_stays(page: Path, catalogue: Catalogue) -> None:
    root = catalogue.root.parent
    assert main([], root, catalogue) == 0
    lines = page.read_text().splitlines()
    assert lines[2:6] == [
        "<!-- table: coin/shares -->",
        "| bias | share |",
        "| --- | --: |",
        "| 0.5 | 0.25 ± 0.00 |",
    ]
    assert (lines[0], lines[-2:]) == ("# Coins", ["<!-- end table -->", "After."])
    # A second run changes nothing.
    assert main(["--check"], root, catalogue) == 0


def test_the_check_fails_when_a_table_and_its_rows_differ(
    page: Path, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    root = catalogue.root.parent
    main([], root, catalogue)
    before = page.read_text()
    write_rows(catalogue.results("coin"), [row({"bias": 0.5}, {"share": OUT_OF_DATE})])
    assert main(["--check"], root, catalogue) == 1
    printed = capsys.readouterr()
    assert "-| 0.5 | 0.25 ± 0.00 |" in printed.out
    assert "+| 0.5 | 0.50 ± 0.00 |" in printed.out
    assert "run experiments/tables" in printed.err
    assert page.read_text() == before


def test_a_picture_is_drawn_from_its_rows_and_the_check_fails_when_they_differ(
    page: Path, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    root = catalogue.root.parent
    assert main([], root, catalogue) == 0
    picture = root / "docs" / "coins.svg"
    assert ">0.25</text>" in picture.read_text()
    picture.write_text(picture.read_text().replace("0.25", "0.75"))
    capsys.readouterr()
    assert main(["--check"], root, catalogue) == 1
    assert "docs/coins.svg from the rows" in capsys.readouterr().out
    assert main([], root, catalogue) == 0
    assert ">0.25</text>" in picture.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n<!-- table: coin/shares -->\n", "results.md:2: the table has no end"),
        ("<!-- table: coin/shares -->\n" * 2 + "<!-- end table -->", "results.md:1: the table has no end"),
        (
            "<!-- table: coin/both_edges -->\n<!-- end table -->",
            "experiment coin has no table 'both_edges': it has shares, fair",
        ),
        (
            "<!-- table: coin/edges -->\n<!-- end table -->",
            "experiment coin has no table 'edges': it has shares, fair",
        ),
        ("<!-- table: dice/shares -->\n<!-- end table -->", "no experiment 'dice'"),
    ],
)
def test_a_comment_that_names_no_table_is_rejected_with_its_line(
    text: str, message: str, page: Path, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write_text(text)
    assert main(["--check"], catalogue.root.parent, catalogue) == 2
    assert message in capsys.readouterr().err
    assert page.read_text() == text


def test_a_table_without_rows_is_rejected(
    page: Path, catalogue: Catalogue, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write_text(DOCUMENT.replace("shares", "fair"))
    write_rows(catalogue.results("coin"), [row({"bias": 0.75}, {"share": IN_DATE})])
    assert main([], catalogue.root.parent, catalogue) == 2
    assert "play the experiment first" in capsys.readouterr().err


def test_tables_of_any_file_of_rows_can_be_printed(
    catalogue: Catalogue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "other.jsonl"
    write_rows(rows, [row({"bias": 0.5}, {"share": OUT_OF_DATE})])
    assert main(["coin", "--rows", str(rows)], catalogue.root.parent, catalogue) == 0
    assert "| 0.5 | 0.50 ± 0.00 |" in capsys.readouterr().out
