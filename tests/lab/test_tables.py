from typing import Any

import pytest

from serve_app.cli import main
from serve_app.lab.tables import documents_table, transposed_table
from tests.terminal import shown_on_terminal

HEAD = ("policy", "n", "short TTFT mean s", "goodput /s")
LINES = [("fcfs", "5", "0.299 ± 0.001", "5.2"), ("ewsjf", "5", "0.106 ± 0.002", "33.4")]
SMALL = ["--profile", "laptop", "--replicas", "1", "--requests", "200", "--jobs", "1", "--rate", "5"]


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line]


def test_cells_of_a_document_have_the_format_below_their_heading() -> None:
    documents: list[dict[str, Any]] = [
        {"pool": "a {b} | c: d", "report": {"wait_s": 1.25}},
        {"pool": "e", "report": None},
    ]
    text = documents_table("pool: {pool} | wait: {report.wait_s:.1f} s | n: {n}", documents)
    assert text.splitlines() == [
        "| pool         |  wait | n |",
        "|--------------|------:|--:|",
        "| a {b} | c: d | 1.2 s | - |",
        "| e            |   - s | - |",
    ]


def test_a_turned_table_has_the_same_cells_with_a_column_for_each_line() -> None:
    turned = cells(transposed_table(HEAD, LINES, 60))
    del turned[1]
    assert list(zip(*turned, strict=True)) == [HEAD, *LINES]


def test_lines_that_do_not_fit_beside_each_other_follow_in_a_table_of_their_own() -> None:
    text = transposed_table(HEAD, LINES, 38)
    assert max(map(len, text.splitlines())) <= 38
    first, second = text.split("\n\n")
    assert ("fcfs" in first, "ewsjf" in first) == (True, False)
    assert ("fcfs" in second, "ewsjf" in second) == (False, True)
    assert cells(first)[2:] == [["n", "5"], ["short TTFT mean s", "0.299 ± 0.001"], ["goodput /s", "5.2"]]


def test_long_text_is_folded_and_whole() -> None:
    settings = "llama2-70b max_num_seqs=512 max_num_batched_tokens=2048"
    text = transposed_table(("fleet", "settings"), [("pools", settings)], 50)
    assert max(map(len, text.splitlines())) <= 50
    _, _, *rows = cells(text)
    assert len(rows) > 1
    assert " ".join(row[1] for row in rows) == settings
    assert [row[0] for row in rows] == ["settings", *[""] * (len(rows) - 1)]


def test_tables_of_commands_fit_the_terminal() -> None:
    command = ("-m", "serve_app", "simulate", "--trace", "paper-mix", *SMALL, "--policy", "direct,fcfs,ewsjf")
    shown = shown_on_terminal(*command, columns=72)
    assert max(map(len, shown.splitlines())) <= 72
    for heading in ("| short TTFT p99 s", "| policy"):
        assert heading in shown


def test_in_a_pipe_a_table_is_markdown_whatever_its_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", "paper-mix", *SMALL, "--policy", "fcfs"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows[0].startswith("| policy | seeds | short TTFT mean s | ")
    assert set(rows[1]) == set("|-:")
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) > 100
