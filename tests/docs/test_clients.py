"""The table of clients says what the tests with real engines show, cell by cell."""

from tests.docs.documents import ROOT
from tests.engines.vllm.clients import CHECKS


def test_every_cell_has_a_check_and_every_check_a_cell() -> None:
    lines = (ROOT / "docs" / "clients.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    heads, _, *clients = rows
    assert all(len(row) == len(heads) for row in clients)
    found = {
        (row[0], feature): cell
        for row in clients
        for feature, cell in zip(heads[1:], row[1:], strict=True)
        if cell
    }
    assert set(found.values()) == {"yes"}
    assert set(found) == set(CHECKS)
