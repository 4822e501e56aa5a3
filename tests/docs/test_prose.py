"""Links, names and tables in documents: all lead to something that exists."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from serve_app.serving.gateway.request.endpoints import SCHEDULED
from tests.docs import documents, names
from tests.docs.documents import ROOT, Passage, heading_anchors, passages
from tests.docs.marks import BlockError
from tests.engines.vllm.clients import CHECKS
from tests.engines.vllm.compared_requests import compared_paths

DOCUMENTS = documents.documents()
# An entry about an old release may name what no longer exists.
NAMING = [document for document in DOCUMENTS if document != "CHANGELOG.md"]


def _report(findings: list[str]) -> None:
    if findings:
        pytest.fail("\n".join(findings), pytrace=False)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    _report(
        [
            f"{passage.place}: {problem}"
            for passage in passages(document)
            for link in passage.links
            if (problem := _broken(document, link))
        ]
    )


def _broken(document: str, link: str) -> str | None:
    """Return what is wrong with a link inside the repository; other links are not followed."""
    if re.match(r"[a-z]+:", link):
        return None
    name, _, fragment = unquote(link).partition("#")
    target = (ROOT / document).parent / name if name else ROOT / document
    if not target.exists():
        return f"{link} leads nowhere"
    path = str(target.resolve().relative_to(ROOT.resolve()))
    if fragment and target.suffix == ".md" and fragment not in heading_anchors(path):
        return f"{link}: {path} has no such heading"
    return None


@pytest.mark.parametrize("document", NAMING)
def test_names_in_code_spans_exist(document: str) -> None:
    _report(
        [
            f"{passage.place}: {problem}"
            for passage in passages(document)
            for span in passage.code
            for problem in _wrong_names(span)
        ]
    )


def _wrong_names(span: str) -> Iterator[str]:
    for check in (names.check_metrics, names.check_setting, names.check_file, names.check_module):
        try:
            check(span)
        except BlockError as exc:
            yield str(exc)


def test_every_page_can_be_reached_from_the_front_page() -> None:
    reached, ahead = set(), ["docs/index.md"]
    while ahead:
        document = ahead.pop()
        if document in reached or document not in DOCUMENTS:
            continue
        reached.add(document)
        for passage in passages(document):
            for link in passage.links:
                if not re.match(r"[a-z]+:", link) and (name := link.partition("#")[0]):
                    target = ((ROOT / document).parent / name).resolve()
                    ahead.append(str(target.relative_to(ROOT.resolve())))
    pages = {document for document in DOCUMENTS if document.startswith("docs/")}
    assert pages <= reached, f"no links lead to {', '.join(sorted(pages - reached))}"


@pytest.mark.parametrize(
    ("span", "is_wrong"),
    [
        ("ewsjf_dispatches_total", False),
        ("ewsjf_queue_wait_seconds_bucket", False),
        ("ewsjf_nothing_total", True),
        ("models[].scheduler.max_waiting", False),
        ("models[0].scheduler.max_waiting", False),
        ("scheduler.max_waiting", False),
        ("scheduler.max_waitings", True),
        ("Scheduler.handle", False),
        ("scripts/check", False),
        ("scripts/nothing", True),
        ("experiments/<name>/README.md", False),
        ("out/report.json", False),
        ("text/plain", False),
        ("serve_app.errors", False),
        ("serve_app.errors:Outcome", False),
        ("serve_app.errors.Nothing", True),
    ],
)
def test_only_names_that_do_not_exist_are_found(span: str, is_wrong: bool) -> None:
    assert bool(list(_wrong_names(span))) == is_wrong


# -- map of the code: names every package once, and only files, methods and tests that exist --------------

MAP = "docs/architecture.md"
NAMING_CODE = (MAP, "docs/code-index.md", "CONTRIBUTING.md")

# A cell of a table is a passage, too.
_BARE_FILE = re.compile(r"\w+\.(?:py|js|env)\Z")
_ATTRIBUTE = re.compile(r"([A-Za-z_]\w*)\.([a-z_]\w*)\Z")


def packages() -> list[str]:
    found = (path.parent.relative_to(ROOT) for path in (ROOT / "serve_app").rglob("__init__.py"))
    return sorted(str(package) for package in found if package != Path("serve_app"))


def test_the_map_has_one_row_for_each_package() -> None:
    (begin,) = (each.line for each in passages(MAP) if each.kind == "heading" and each.text == "Packages")
    cells = [each for each in passages(MAP) if each.kind == "table" and each.line > begin and each.code]
    rows = Counter(cell.code[0] for cell in cells)
    assert [package for package in packages() if rows[package] != 1] == []


@pytest.mark.parametrize("document", NAMING_CODE)
def test_files_without_a_folder_are_beside_a_file_of_the_same_passage(document: str) -> None:
    missing = [
        f"{passage.place}: {name}"
        for passage in passages(document)
        for name in passage.code
        if _BARE_FILE.match(name) and not any((folder / name).exists() for folder in _folders(passage))
    ]
    assert missing == []


def _folders(passage: Passage) -> Iterator[Path]:
    """Folders of the paths that a passage names."""
    for name in passage.code:
        path = ROOT / name
        if "/" in name and path.exists():
            yield path if path.is_dir() else path.parent


@pytest.mark.parametrize("document", NAMING_CODE)
def test_dotted_names_exist(document: str) -> None:
    missing = [
        f"{passage.place}: {name}"
        for passage in passages(document)
        for name in passage.code
        if (parts := _ATTRIBUTE.match(name)) and not _BARE_FILE.match(name) and not _exists(*parts.groups())
    ]
    assert missing == []


def _exists(holder: str, attribute: str) -> bool:
    """Return whether a class has the attribute, a package the module, or the root the file."""
    if holder[0].isupper():
        pattern = re.compile(
            rf"^class {holder}\b.*?^    (?:async )?(?:def )?{attribute}\b", re.MULTILINE | re.DOTALL
        )
        return any(pattern.search(path.read_text()) for path in (ROOT / "serve_app").rglob("*.py"))
    if (ROOT / f"{holder}.{attribute}").exists() or holder in names.block_names():
        return True  # a file of the root, or a setting, which another test looks up
    return any((ROOT / "serve_app").rglob(f"{holder}/{attribute}.py"))


def test_the_invariants_of_the_map_are_tested_by_these_names() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests/properties").glob("*.py"))
    rows = [passage for passage in passages(MAP) if passage.kind == "table" and passage.code]
    invariants = [row.code[0] for row in rows if re.fullmatch(r"[a-z]+(_[a-z]+)+", row.code[0])]
    assert len(invariants) >= 10
    assert [name for name in invariants if f"def {name}(" not in tests] == []


# -- tables of clients and endpoints, compared with the tests of real engines -----------------------------


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
