"""Tables of clients and endpoints, compared with the tests of real engines."""

from serve_app.serving.gateway.request.endpoints import SCHEDULED
from tests.docs.documents import ROOT
from tests.engines.vllm.clients import CHECKS
from tests.engines.vllm.compared_requests import compared_paths


def test_every_cell_has_a_check_and_every_check_a_cell() -> None:
    lines = (ROOT / "docs" / "clients.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    heads: list[str] = []
    found: dict[tuple[str, str], str] = {}
    for row in rows:
        if row[0] == "Client":
            heads = row
        else:
            cells = zip(heads[1:], row[1:], strict=True)
            found |= {(row[0], feature): cell for feature, cell in cells if cell.strip("-")}
    assert set(found.values()) == {"yes"}
    assert set(found) == set(CHECKS)


def test_every_scheduled_endpoint_is_compared_with_an_engine() -> None:
    """As the endpoints page states; forms contain audio, which no engine of these tests accepts."""
    assert compared_paths() == set(SCHEDULED)
