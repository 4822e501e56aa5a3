"""Rows of experiments, and the tables, documents and pictures made from them."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.picture import Line, Panel, drawn
from experiments.common.provenance import TraceSource, trace_sources
from experiments.common.rows import ANY, line_of, read_rows, rounded, where
from experiments.common.tables import Table, caption, plus_minus
from experiments.common.tables_command import main
from serve_app.errors import SettingsError
from tests.experiments.builders import row, write_rows


def test_a_cell_is_the_mean_and_half_the_width_of_its_interval() -> None:
    # Two values 1 apart: half the interval is 12.706 times half of it.
    assert plus_minus([4.0, 5.0]) == "4.50 ± 6.35"
    assert plus_minus([0.0015], 1, scale=1_000) == "1.5"
    assert plus_minus([None, 2.0], 0) == "2"
    assert plus_minus([None]) == "-"


def test_rows_are_chosen_by_their_key() -> None:
    rows = [row({"load": 0.5}), row({"load": 0.9}), row({"load": 0.9, "policy": "fcfs"}), row({"cost": 1})]
    assert where(rows, load=0.9) == rows[1:3]
    assert where(rows, load=(0.5, 0.9), policy="fcfs") == [rows[2]]
    assert where(rows, load=ANY) == rows[:3]
    assert where(rows) == rows


def test_the_caption_states_the_origin_of_figures() -> None:
    rows = [
        row(seeds=range(5), traces=[TraceSource(name="azure-conv", sha256="2f1e5b666d4e")]),
        row(seeds=range(3), traces=[TraceSource(name="lmsys")], commit="ffff000011+changes"),
        row(seeds=(), measured_at="2025-02-01T00:00:00+00:00"),
    ]
    assert caption(rows, "A note.") == (
        "A note. 3 to 5 seeds. Generated lengths: lmsys. Trace files: azure-conv (SHA-256 2f1e5b66). "
        "Measured 2025-01-02 to 2025-02-01 at commit 0123456, ffff000+changes on "
        "A CPU, 2 cores, 8 GiB, by `experiments/run coin`."
    )
    assert caption([row(seeds=(7,))]).startswith("One seed. Measured 2025-01-02 at")
    assert "commit unknown" in caption([row(commit=None)])


def test_a_table_shows_and_describes_its_own_rows_only() -> None:
    table = Table(text=lambda rows: f"{len(rows)} rows", where={"load": 0.9})
    rows = [row({"load": 0.9}), row({"load": 0.5}, measured_at="2020-01-01T00:00:00+00:00")]
    assert table.written(rows).startswith("1 rows\n\n*3 seeds. Measured 2025-01-02 at")
    with pytest.raises(SettingsError, match=r"no row has \{'load': 0\.9\}"):
        table.written(rows[1:])


def test_rows_are_read_from_their_file_unchanged(tmp_path: Path) -> None:
    rows = [
        row({"load": 0.5, "policy": "fcfs"}, {"ttft_s": [0.1, None]}),
        row(traces=[TraceSource(name="lmsys")]),
    ]
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    assert read_rows(path) == rows
    assert read_rows(tmp_path / "none.jsonl") == []


def test_figures_have_six_digits() -> None:
    assert rounded({"a": [0.123456789, None, 123456789], "b": 1234567.8}) == {
        "a": [0.123457, None, 123456789],
        "b": 1234570.0,
    }


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{line_of(row())}\n{{"experiment": "coin"}}\n')
    with pytest.raises(SettingsError, match=r"rows\.jsonl:2 is no row"):
        read_rows(path)
    with pytest.raises(ValueError, match="JSON"):
        line_of(row(figures={"ttft_s": float("inf")}))


def test_a_trace_file_is_known_by_its_checksum_and_a_generator_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text("abc")
    monkeypatch.setenv("EWSJF_TRACES", str(tmp_path))
    conv, mix = trace_sources("azure-conv+paper-mix")
    assert conv.name == "azure-conv"
    assert conv.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert mix == TraceSource(name="paper-mix")
    # No local path appears in a row.
    own = tmp_path / "own.csv"
    own.write_text("abc")
    assert trace_sources(str(own))[0].name == "own.csv"


# -- `experiments/tables`: documents follow their rows ----------------------------------------------------

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


def test_every_text_of_a_picture_is_escaped() -> None:
    panel = Panel(title="by <kind>", ticks=["<1"], lines=[Line("scheduler & core", [0.125])])
    found = set(ET.fromstring(drawn("cost & price", "of a <request>", [panel])).itertext())
    assert {"cost & price", "of a <request>", "by <kind>", "<1", "scheduler & core", "0.12"} <= found
